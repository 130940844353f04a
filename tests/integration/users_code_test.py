"""Subclasses of users, callbacks that change a trainer, and models that count."""

from collections import Counter, defaultdict, deque
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.common import Lazy, Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.metrics import Metric
from allennlp.training.trainer import Trainer
from allennlp.training.util import get_metrics

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, state_arrays


class Net(Model):
    """Counts how often its metrics are asked for."""

    def __init__(self, vocab: Optional[Vocabulary] = None) -> None:
        super().__init__(vocab or Vocabulary())
        self.layer = torch.nn.Linear(4, 3)
        self.times_asked = 0

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (1 + self.times_asked) * self.layer(x).square().mean()}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        self.times_asked += 1
        return {"asked": self.times_asked}


class Plain(Net):
    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {}


def batches(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.rand(2, 4, generator=generator)} for _ in range(3)]


def arguments(directory: Path, trainer_class: Any = DeepSpeedTrainer, **others: Any) -> Any:
    """A trainer in this process."""
    torch.manual_seed(1)
    model = others.pop("model", Plain)()
    values = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": Batches(batches(0)),
        "num_epochs": 2,
        "cuda_device": -1,
        "serialization_dir": directory,
        "enable_default_callbacks": False,
        "run_confidence_checks": False,
        **others,
    }
    if issubclass(trainer_class, DeepSpeedTrainer):
        values.setdefault("deepspeed_config", {"zero_optimization": {"stage": 2}})
    return trainer_class(**values)


class OwnLoop(DeepSpeedTrainer):
    """As the loops of notebooks and of repositories beside papers."""

    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        self._pytorch_model.train()
        loss = 0.0
        for batch in self.data_loader:
            self.zero_grad()
            outputs = self.batch_outputs(batch, for_training=True)
            outputs["loss"].backward()
            self.step()
            loss += outputs["loss"].item()
            self._batches_in_epoch_completed += 1
            self._total_batches_completed += 1
        return get_metrics(self.model, loss, None, None, None, len(self.data_loader), reset=True)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


class OwnOptimizer(OwnLoop):
    """Which the trainer knows nothing of."""

    def step(self) -> None:
        pass


def _error(trainer: Any) -> str:
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("stage, world_size", [(0, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("trainer_class", [OwnLoop, OwnOptimizer])
def test_a_step_around_the_engine_is_refused(
    stage: int, world_size: int, trainer_class: Any, expect_message: Callable[[str], None]
) -> None:
    side = Side(Plain, batches, stage, world_size, trainer_class=trainer_class)
    messages = set(side.on_all_ranks(_error))
    assert len(messages) == 1
    expect_message(messages.pop())


def test_an_epoch_around_that_of_the_trainer_is_trained() -> None:
    class AroundTheLoop(DeepSpeedTrainer):
        def _train_epoch(self, epoch: int) -> Dict[str, float]:
            return super()._train_epoch(epoch)

        def batch_outputs(self, batch: Any, for_training: bool) -> Dict[str, torch.Tensor]:
            outputs = super().batch_outputs(batch, for_training)
            return {**outputs, "loss": 2 * outputs["loss"]}

    doubled = Side(Plain, batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.6))
    side = Side(Plain, batches, 3, trainer_class=AroundTheLoop)
    assert_same_weights(side.train(), doubled.train())


class TwoLosses(Plain):
    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        states = self.layer(x)
        return {"loss": (states - 1).square().mean(), "other": states.exp().mean()}


class Surgery(TrainerCallback):
    """Goes backward from two losses, and removes the conflict of their gradients."""

    def on_backward(self, trainer: Any, batch_outputs: Any, *args: Any, **kwargs: Any) -> bool:
        parameters = list(trainer.model.parameters())
        batch_outputs["other"].backward(retain_graph=True)
        others = [parameter.grad.clone() for parameter in parameters]
        trainer.optimizer.zero_grad()
        batch_outputs["loss"].backward()
        for parameter, other in zip(parameters, others):
            product = (parameter.grad * other).sum()
            parameter.grad -= product.clamp(max=0) / other.square().sum() * other
        return True


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "stage, deepspeed_config, tolerance",
    [(1, {}, 1e-5), (2, {}, 1e-5), (0, BF16, 0.02)],
)
def test_a_callback_clears_gradients_between_two_backward_passes(
    stage: int, deepspeed_config: Dict[str, Any], tolerance: float
) -> None:
    common: Any = {
        "callbacks": lambda: [Surgery("")],
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "num_gradient_accumulation_steps": 2,
    }
    expected = Side(TwoLosses, batches, **common).train()
    side = Side(TwoLosses, batches, stage, deepspeed_config=deepspeed_config, **common)
    assert_same_weights(side.train(), expected, tolerance=tolerance)


class OnlyTheLast(TrainerCallback):
    """Drops the gradients of all micro-batches except the last."""

    reads_gradients = False

    def on_backward(self, trainer: Any, *args: Any, **kwargs: Any) -> bool:
        trainer.optimizer.zero_grad()
        return False


IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("deepspeed_config, tolerance", [({}, 1e-5), (IN_FP32, 0.02)])
def test_a_callback_clears_the_gradients_of_earlier_micro_batches(
    stage: int, deepspeed_config: Dict[str, Any], tolerance: float
) -> None:
    common: Any = {"callbacks": lambda: [OnlyTheLast("")], "num_gradient_accumulation_steps": 2}
    side = Side(
        Plain,
        batches,
        stage,
        deepspeed_config=deepspeed_config,
        gradient_synchronization="step",
        **common,
    )
    assert_same_weights(side.train(), Side(Plain, batches, **common).train(), tolerance=tolerance)


def test_gradients_that_have_been_reduced_are_not_cleared(
    expect_message: Callable[[str], None],
) -> None:
    side = Side(
        Plain,
        batches,
        2,
        callbacks=lambda: [OnlyTheLast("")],
        num_gradient_accumulation_steps=2,
        gradient_synchronization="micro_batch",
    )
    (message,) = side.on_all_ranks(_error)
    expect_message(message)


class Shrink(TrainerCallback):
    """Changes the loss, from which backward has been prepared."""

    def on_backward(self, trainer: Any, batch_outputs: Any, *args: Any, **kwargs: Any) -> bool:
        batch_outputs["loss"] *= 0.1
        return False


def _loss_and_weights(trainer: Any) -> Any:
    loss = trainer.train()["training_loss"]
    return loss, state_arrays(trainer)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_a_callback_assigns_has_no_effect(stage: int) -> None:
    sides = [Side(Plain, batches, each, callbacks=lambda: [Shrink("")]) for each in (None, stage)]
    (expected, expected_weights), (loss, weights) = (
        side.on_all_ranks(_loss_and_weights)[0] for side in sides
    )
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, array in expected_weights.items():
        assert weights[name] == pytest.approx(array, rel=1e-4), name


class NumberAsLoss(Plain):
    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x)["loss"].item()}  # type: ignore[dict-item]


def _refusal(trainer: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return str(error.value)


def test_a_loss_that_is_a_number_is_refused() -> None:
    (message,) = Side(NumberAsLoss, batches, 2).on_all_ranks(_refusal)
    assert "doesn't depend on any trainable parameter" in message


class GoesBackward(TrainerCallback):
    """Outside of steps, and leaves the gradients."""

    def __init__(self, through: str) -> None:
        super().__init__("")
        self.through = through

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        getattr(trainer, self.through)(x=torch.ones(2, 4))["loss"].backward()

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.on_start(trainer)


def has_gradients() -> Plain:
    model = Plain()
    model(torch.ones(2, 4))["loss"].backward()
    return model


# Summed in fp32.
IN_BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    "stage, world_size, config",
    [(0, 1, {}), (1, 2, {}), (2, 2, {}), (3, 2, {}), (1, 1, IN_BF16), (2, 1, IN_BF16)],
)
@pytest.mark.parametrize("where", ["model", "engine", "before construction"])
def test_gradients_of_other_backward_passes_are_cleared(
    where: str, stage: int, world_size: int, config: Dict[str, Any]
) -> None:
    model, callbacks = Plain, lambda: [GoesBackward(where)]
    if where == "before construction":
        model, callbacks = has_gradients, list  # type: ignore[assignment]
    sides = [
        Side(m, batches, stage, world_size, callbacks=c, deepspeed_config=config)
        for m, c in ((model, callbacks), (Plain, list))
    ]
    actual, expected = (side.train() for side in sides)
    assert_same_weights(actual, expected, tolerance=0)


class SecondOnce(Plain):
    """Uses its second layer in the first pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(4, 4)
        self.num_passes = 0

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.num_passes += 1
        return super().forward(self.second(x) if self.num_passes == 1 else x)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_offloaded_gradient_is_of_its_step_alone(device: str) -> None:
    zero = {"offload_optimizer": {"device": device}}
    expected = Side(SecondOnce, batches).train()
    assert_same_weights(Side(SecondOnce, batches, 2, zero=zero).train(), expected)


def test_each_group_is_warmed_up_to_its_own_rate() -> None:
    side = Side(
        Plain,
        batches,
        2,
        optimizer=lambda parameters: torch.optim.SGD(
            [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.01))]
        ),
        deepspeed_config={
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 2, "warmup_max_lr": "auto"},
            }
        },
    )
    (rates,) = side.on_all_ranks(
        lambda trainer: (trainer.train(), [g["lr"] for g in trainer.optimizer.param_groups])[1]
    )
    assert rates == pytest.approx([0.1, 0.01])


class Merging(Plain):
    """Adds an adapter to its frozen weight while it evaluates, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.eye(4), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.full((4, 4), 0.1))
        self.is_merged = False

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        weight = self.base if self.is_merged else self.base + self.adapter
        return super().forward(x @ weight)

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.is_merged == mode:
            self.base.data += -self.adapter.data if mode else self.adapter.data
            self.is_merged = not mode
        return self


@pytest.mark.parametrize("stage", [0, 2])
def test_what_evaluation_merges_is_taken_back_within_an_epoch(stage: int) -> None:
    expected, actual = (
        Side(Merging, batches, stage, validation_data_loader=Batches(batches(0)), **more).train()
        for more in ({}, {"validate_every_num_batches": 1})
    )
    assert_same_weights(actual, expected, tolerance=1e-6)


class Tally:
    """Objects of which none equals another."""

    def __init__(self) -> None:
        self.count = torch.zeros(())


class Records(Metric):
    """Accumulates what checkpoints don't include: see `_reset` of its subclasses."""

    def __init__(self) -> None:
        self.labels = {Tally(), Tally()}
        self.reset()

    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        total = float(self.total())
        if reset:
            self.reset()
        return {"total": total}

    def total(self) -> Any:
        raise NotImplementedError


class Many(Records):
    """More values than are compared, in a list that is cleared."""

    def __init__(self) -> None:
        self.records: List[Any] = []
        super().__init__()

    def __call__(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.records += [{"x": x.sum().item(), "of": [len(x)]} for _ in range(6_000)]

    def total(self) -> Any:
        return sum(record["x"] for record in self.records)

    def reset(self) -> None:
        self.records.clear()


class Fractions(Records):
    def __call__(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.sum += Fraction(x.sum().item())
        self.by_size[len(x)] += Fraction(1, 3)

    def total(self) -> Any:
        return self.sum + sum(self.by_size.values())

    def reset(self) -> None:
        self.sum, self.by_size = Fraction(), defaultdict(Fraction)


class ByObjects(Records):
    """Keys that are objects, and counts in place."""

    def __call__(self, x: torch.Tensor) -> None:  # type: ignore[override]
        for label in self.labels:
            label.count += len(x)
            self.by_labels[label, len(x)].append(x.sum().item())
            self.seen.add(label)
        self.recent.append((label, self.by_labels))

    def total(self) -> Any:
        sums = sum(map(sum, self.by_labels.values()))
        counts = sum(label.count for label in self.seen)
        return sums + counts + len(self.by_labels) + 100 * len(self.recent)

    def reset(self) -> None:
        for label in self.labels:
            label.count.zero_()
        self.by_labels, self.seen = defaultdict(list), set()
        self.recent = deque(maxlen=100)


class Nested(Records):
    """Two attributes that refer to the same object."""

    def __call__(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.by_size[len(x)].update({"x": x.sum().item(), "batches": 1})

    def total(self) -> Any:
        return sum(sum(counts.values()) for counts in self.same.values())

    def reset(self) -> None:
        self.by_size: Any = defaultdict(Counter)
        self.same = self.by_size


class Recording(Plain):
    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.metric(x)
        return super().forward(x)

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return self.metric.get_metric(reset)  # type: ignore[no-any-return]


@pytest.mark.parametrize("metric", [Many, Fractions, ByObjects, Nested])
def test_validations_within_an_epoch_leave_its_metrics_as_they_are(
    metric: Callable[[], Metric],
) -> None:
    def metrics_of_training(trainer: Any) -> Any:
        return trainer.train()["training_total"]

    expected, actual = (
        Side(
            lambda: Recording(metric()),
            batches,
            stage,
            validation_data_loader=Batches(batches(1)[:2]),
            **more,
        ).on_all_ranks(metrics_of_training)
        for stage, more in ((None, {}), (2, {"validate_every_num_batches": 1}))
    )
    assert actual == pytest.approx(expected)


class WithEval(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.num_evals = 0

    def eval(self) -> "WithEval":
        self.num_evals += 1
        return super().eval()


class Modes(TrainerCallback):
    def __init__(self) -> None:
        super().__init__("")
        self.seen: Any = set()

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        model = trainer._pytorch_model
        self.seen.add((is_training, model.training, trainer.model.training))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_switched_to_evaluation_as_by_gradient_descent(world_size: int) -> None:
    def modes(trainer: Any) -> Any:
        trainer.train()
        return trainer.model.num_evals, trainer._callbacks[0].seen

    expected, actual = (
        Side(
            WithEval,
            batches,
            stage,
            world_size,
            callbacks=lambda: [Modes()],
            validation_data_loader=Batches(batches(1)),
        ).on_all_ranks(modes)
        for stage in (None, 2)
    )
    assert actual == expected


class WithTrainer(TrainerCallback):
    """Does something with the trainer when the second step has been made."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        super().__init__("")
        self.function = function

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if trainer._total_batches_completed == 2:
            self.function(trainer)


def refused(construct: Callable[[], Any]) -> str:
    with pytest.raises((ConfigurationError, AttributeError, RuntimeError)) as error:
        construct()
    return str(error.value)


@pytest.mark.parametrize("name", ["clip_gradient", "rescale_gradients"])
def test_hooks_that_are_not_called_are_refused(
    tmp_path: Path, name: str, expect_message: Callable[[str], None]
) -> None:
    own = type("OwnClipping", (DeepSpeedTrainer,), {name: lambda self: None})
    expect_message(refused(lambda: arguments(tmp_path, own)))
    callback = WithTrainer(lambda trainer: setattr(trainer, name, lambda: None))
    trainer = arguments(tmp_path, callbacks=[callback])
    expect_message(refused(trainer.train))


@pytest.mark.parametrize("name", ["find_latest_checkpoint", "load_checkpoint"])
def test_methods_of_the_checkpointer_that_are_not_called_are_refused(
    tmp_path: Path, name: str, expect_message: Callable[[str], None]
) -> None:
    own: Any = type("OwnCheckpointer", (DeepSpeedCheckpointer,), {name: lambda self: None})
    expect_message(refused(lambda: own(tmp_path)))


def test_a_checkpointer_may_decide_itself_when_to_save(tmp_path: Path) -> None:
    class EachSecondStep(DeepSpeedCheckpointer):
        def maybe_save_checkpoint(self, trainer, num_epochs_completed, num_batches) -> bool:
            if num_batches in (0, 2):
                self.save_checkpoint(trainer)
                return True
            return False

    validation = {"validation_data_loader": Batches(batches(3)), "num_epochs": 1}
    trainer = arguments(tmp_path, checkpointer=EachSecondStep(tmp_path), **validation)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == [
        "checkpoint_e0_b2",
        "checkpoint_e1_b0",
    ]
    saved = torch.load(trainer.get_best_weights_path(), weights_only=True)
    assert_same_weights(trainer.model.state_dict(), saved, tolerance=0)


class BackwardCallback(TrainerCallback):
    def on_backward(self, trainer: Any, *args: Any, **kwargs: Any) -> bool:
        return False


def test_a_callback_that_goes_backward_is_not_added_later(
    tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    def add(trainer: Any) -> None:
        trainer.callbacks.append(BackwardCallback(""))

    trainer = arguments(tmp_path, callbacks=[WithTrainer(add)])
    expect_message(refused(trainer.train))


def test_the_model_state_is_not_read_from_the_checkpoint_state(
    tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    def save(trainer: Any) -> None:
        torch.save(trainer.get_checkpoint_state().model_state, tmp_path / "state.th")

    expect_message(refused(arguments(tmp_path, callbacks=[WithTrainer(save)]).train))


class ChangeGradients(TrainerCallback):
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._change)

    def _change(self, parameter: torch.nn.Parameter) -> None:
        parameter.grad = (parameter.grad * 0.5).clamp(-0.05, 0.05)


@pytest.mark.parametrize("stage, world_size", [(1, 2), (2, 2), (3, 1), (3, 2)])
def test_hooks_of_callbacks_change_gradients_before_they_are_reduced(
    stage: int, world_size: int
) -> None:
    expected, actual = (
        Side(
            Plain,
            batches,
            each,
            world_size,
            zero={"reduce_bucket_size": 5},
            callbacks=lambda: [ChangeGradients("")],
        ).train()
        for each in (None, stage)
    )
    assert_same_weights(actual, expected)


class ReadingCallback(TrainerCallback):
    def on_batch(self, trainer, batch_inputs, batch_outputs, batch_metrics, *args, **kwargs):
        self.loss = batch_metrics["loss"]


@pytest.mark.parametrize("reads, log_every_num_steps", [(True, None), (True, 2), (False, 1)])
def test_metrics_are_asked_for_once_a_step(
    tmp_path: Path, reads: bool, log_every_num_steps: Optional[int]
) -> None:
    def train(trainer_class: Any, **others: Any) -> Model:
        trainer = arguments(
            tmp_path,
            trainer_class,
            model=Net,
            callbacks=[ReadingCallback("")] if reads else [],
            validation_data_loader=Batches(batches(1)),
            **others,
        )
        trainer.train()
        return trainer.model

    expected = train(GradientDescentTrainer)
    actual = train(DeepSpeedTrainer, log_every_num_steps=log_every_num_steps)
    assert actual.times_asked == expected.times_asked
    assert_same_weights(actual.state_dict(), expected.state_dict())


def test_a_model_that_counts_calls_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments(tmp_path, model=Net).train()
    (warning,) = [r.getMessage() for r in caplog.records if "get_metrics()" in r.getMessage()]
    assert "times_asked" in warning


def test_positional_arguments_are_those_of_allennlp(tmp_path: Path) -> None:
    weights = []
    for trainer_class in (GradientDescentTrainer, DeepSpeedTrainer):
        torch.manual_seed(1)
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        validation = Batches(batches(1))
        kind = DeepSpeedCheckpointer if trainer_class is DeepSpeedTrainer else Checkpointer
        directory = tmp_path / trainer_class.__name__
        directory.mkdir()
        checkpointer = kind(directory, True, None, 1, 1)
        trainer = trainer_class(
            model, optimizer, Batches(batches(0)), 1, "-loss", validation, 3, directory,
            checkpointer, -1, 0.5, 0.1,
        )  # fmt: skip
        trainer.train()
        weights.append(model.state_dict())
    assert_same_weights(weights[1], weights[0])


def test_an_epoch_without_train_and_without_callbacks(tmp_path: Path) -> None:
    weights = []
    for trainer_class in (GradientDescentTrainer, DeepSpeedTrainer):
        torch.manual_seed(1)
        trainer = arguments(tmp_path, trainer_class)
        trainer._callbacks.clear()
        metrics = [trainer._train_epoch(0)["loss"], trainer._train_epoch(0)["loss"]]
        if trainer_class is DeepSpeedTrainer:
            trainer.close()
        weights.append((trainer.model.state_dict(), metrics))
    assert weights[1][1] == pytest.approx(weights[0][1], rel=1e-5)
    assert_same_weights(weights[1][0], weights[0][0])


def test_epochs_without_train_draw_other_random_numbers(tmp_path: Path) -> None:
    class Shuffled(Batches):
        orders: List[int] = []

        def __iter__(self) -> Any:
            self.orders.append(int(torch.randint(10**9, ())))
            return super().__iter__()

    trainer = arguments(tmp_path, data_loader=Shuffled(batches(0)))
    trainer._train_epoch(0)
    trainer._train_epoch(0)
    trainer.close()
    assert len(set(Shuffled.orders)) == len(Shuffled.orders) == 2


@Trainer.register("with_own_key", constructor="from_partial_objects")
class WithOwnKey(DeepSpeedTrainer):
    def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha


@Checkpointer.register("of_a_user")
class OwnCheckpointer(DeepSpeedCheckpointer):
    def __init__(self, serialization_dir: str, beta: int = 0, **kwargs: Any) -> None:
        super().__init__(serialization_dir, **kwargs)
        self.beta = beta


def test_subclasses_have_keys_of_their_own(tmp_path: Path) -> None:
    section = {
        "type": "with_own_key",
        "alpha": 0.25,
        "num_epochs": 1,
        "cuda_device": -1,
        "optimizer": {"type": "sgd", "lr": 0.1},
        "checkpointer": {"type": "of_a_user", "beta": 3, "save_every_num_batches": 2},
        "deepspeed_config": {"zero_optimization": {"stage": 1}},
    }
    lazy: Lazy[Trainer] = Lazy(Trainer, params=Params(section))
    trainer: Any = lazy.construct(
        model=Plain(), data_loader=Batches(batches(0)), serialization_dir=str(tmp_path)
    )
    assert type(trainer) is WithOwnKey and trainer.alpha == 0.25
    assert type(trainer.checkpointer) is OwnCheckpointer and trainer.checkpointer.beta == 3
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint_*")} == {
        "checkpoint_e0_b2",
        "checkpoint_e1_b0",
    }
