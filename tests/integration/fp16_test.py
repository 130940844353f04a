"""
Training in fp16, on the CPU: loss scaling, and what a step leaves as it was when it overflows. The
reference is AllenNLP's trainer in fp32, with plain SGD, which hides nothing.
"""

import copy
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn.regularizers import L2Regularizer, RegularizerApplicator
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import SlantedTriangular
from allennlp.training.momentum_schedulers import InvertedTriangular
from allennlp.training.moving_average import ExponentialMovingAverage

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from tests.fixtures import components  # noqa: F401  # registers "either_of_two_embedders"
from tests.integration import trainer_test
from tests.support.experiment import FP16, assert_same_weights
from tests.support.side_by_side import Side
from tests.support.workers import run_workers

# Of the gradients, which have 11 significant bits, over all steps.
TOLERANCE = 0.02

# Too large a scale at first, and again after every few steps.
OVERFLOWING = {
    "fp16": {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1}
}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def config(stage: int, precision: Dict[str, Any]) -> Dict[str, Any]:
    zero: Dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": zero, **precision}


class SkippingSGD(torch.optim.SGD):
    """Leaves out the steps with these numbers, counted from 0."""

    skipped: Set[int] = set()
    num_calls = 0

    def step(self, closure=None):
        self.num_calls += 1
        if self.num_calls - 1 not in self.skipped:
            super().step(closure)


class SkippingAverage(ExponentialMovingAverage):
    """Leaves out the same steps as its optimizer."""

    def __init__(self, task: "Task") -> None:
        super().__init__(task.model.named_parameters(), decay=0.5)
        self._optimizer = task.optimizer

    def apply(self, num_updates: Optional[int] = None) -> None:
        if self._optimizer.num_calls - 1 not in self._optimizer.skipped:
            super().apply(num_updates)


class RecordSteps(TrainerCallback):
    """Which steps DeepSpeed has left out, and what callbacks see after each."""

    def __init__(self) -> None:
        super().__init__("")
        self.skipped: Set[int] = set()
        self.settings: List[Any] = []
        self.norms: List[Optional[float]] = []
        self.averages: List[float] = []

    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        # At stage 0 DeepSpeed has the optimizer make a step before the first.
        self._num_calls = trainer.optimizer.num_calls

    def on_batch(self, trainer, *args: Any, batch_grad_norm=None, **kwargs: Any) -> None:
        if trainer.optimizer.num_calls == self._num_calls:
            self.skipped.add(len(self.settings))
        self._num_calls = trainer.optimizer.num_calls
        group = trainer.optimizer.param_groups[0]
        self.settings.append((group["lr"], group["momentum"]))
        self.norms.append(batch_grad_norm)
        if trainer._moving_average is not None:
            shadows = trainer._moving_average.state_dict()["shadows"]
            self.averages.append(sum(float(shadow.norm()) for shadow in shadows.values()))


class SetScale(TrainerCallback):
    """Gives autocast's loss scale what `OVERFLOWING` gives that of fp16, unless it is recovered."""

    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        scaler = trainer.engine.torch_autocast_z0_gradscaler
        is_new = trainer._start_after_batches_in_epoch_completed == 0
        if isinstance(scaler, torch.amp.GradScaler) and is_new:
            state = {**scaler.state_dict(), "scale": 2.0**21, "growth_interval": 2}
            scaler.load_state_dict(state)


AVERAGED = {"type": "bag_of_embeddings", "embedding_dim": 12, "averaged": True}


class Task(trainer_test.Task):
    """A model that is smooth in its weights, and its data, the same each time."""

    def __init__(self, lr: float = 2.0, momentum: float = 0.5, **model: Any) -> None:
        super().__init__({"model": model} if model else {"model.seq2vec_encoder": AVERAGED})
        self.untrained = copy.deepcopy(self.model.state_dict())
        self.optimizer = SkippingSGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.record = RecordSteps()

    def train(self, *arguments: Any, **settings: Any) -> Any:
        return self.trainer(*arguments, **settings).train()

    def trainer(
        self, directory: Path, precision: Optional[Dict[str, Any]], **settings: Any
    ) -> GradientDescentTrainer:
        arguments = self.arguments(directory)
        arguments.update(validation_data_loader=None, callbacks=[self.record])
        arguments.update(settings)
        if precision is None:
            return GradientDescentTrainer(**arguments)
        return DeepSpeedTrainer(**arguments, deepspeed_config=precision)

    def with_schedules(self) -> Dict[str, Any]:
        schedule = {"optimizer": self.optimizer, "num_epochs": 2, "num_steps_per_epoch": 15}
        return {
            "learning_rate_scheduler": SlantedTriangular(**schedule),
            "momentum_scheduler": InvertedTriangular(self.optimizer, cool_down=10, warm_up=20),
        }


def assert_trains_as_fp32(task: Task, reference: Task, losses: Any, expected: Any) -> None:
    """That the weights differ from each other by much less than training has moved them."""
    assert losses["training_loss"] == pytest.approx(expected["training_loss"], abs=2e-3)
    assert task.record.settings == reference.record.settings
    before = task.untrained
    for name, weight in reference.model.state_dict().items():
        moved = float((weight - before[name]).norm())
        assert moved > 0.01
        difference = float((task.model.state_dict()[name] - weight).norm())
        assert difference < TOLERANCE * moved, f"{name}: {difference} of {moved}"


SETTINGS = {
    "clipping_of_the_norm": {"grad_norm": 0.1},
    # Of 15 batches, so that some steps have fewer.
    "clipping_of_elements": {"grad_clipping": 0.01, "num_gradient_accumulation_steps": 2},
}


def assert_overflows_are_left_out(
    directory: Path, precision: Dict[str, Any], settings: Dict[str, Any]
) -> None:
    """Schedules, clipping and the moving average leave out the steps that the optimizer does."""
    reference, task = Task(), Task()
    arguments = {**task.with_schedules(), **settings, "callbacks": [task.record, SetScale("")]}
    average = ExponentialMovingAverage(task.model.named_parameters(), decay=0.5)
    losses = task.train(directory / "fp16", precision, moving_average=average, **arguments)
    skipped, averages = task.record.skipped, task.record.averages
    assert 0 in skipped and max(skipped) > 5 and len(skipped) < len(averages) / 2
    same = {step for step in range(1, len(averages)) if averages[step] == averages[step - 1]}
    assert same == skipped - {0}
    reference.optimizer.skipped = skipped
    arguments = {**reference.with_schedules(), **settings}
    # The weights that come out of training are the averages.
    arguments["moving_average"] = SkippingAverage(reference)
    expected = reference.train(directory / "fp32", None, **arguments)
    assert_trains_as_fp32(task, reference, losses, expected)
    norms, expected_norms = (
        [each.record.norms[step] or 0 for step in range(len(averages)) if step not in skipped]
        for each in (task, reference)
    )
    assert norms == pytest.approx(expected_norms, rel=0.02)


@pytest.mark.parametrize(
    "settings, stage",
    [
        *(("clipping_of_the_norm", stage) for stage in range(4)),
        ("clipping_of_elements", 0),
        ("clipping_of_elements", 3),
    ],
)
def test_a_step_that_overflows_is_left_out(tmp_path: Path, stage: int, settings: str) -> None:
    assert_overflows_are_left_out(tmp_path, config(stage, OVERFLOWING), SETTINGS[settings])


@pytest.mark.parametrize("settings", SETTINGS)
def test_autocast_to_fp16_trains_as_fp32_does_at_stage_0(tmp_path: Path, settings: str) -> None:
    assert_overflows_are_left_out(tmp_path, config(0, AUTOCAST), SETTINGS[settings])


class GoBackwardTwice(TrainerCallback):
    """Through halves of the loss, as a callback may."""

    reads_gradients = False

    def on_backward(self, trainer, batch_outputs, backward_called: bool, **kwargs: Any) -> bool:
        half = batch_outputs["loss"] / trainer.num_gradient_accumulation_steps / 2
        with trainer.no_sync():
            trainer.engine.backward(half, scale_wrt_gas=False, retain_graph=True)
        trainer.engine.backward(half, scale_wrt_gas=False)
        return True


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_of_callbacks_are_scaled(tmp_path: Path, stage: int) -> None:
    reference, task = Task(), Task()
    expected = reference.train(tmp_path / "fp32", None)
    callbacks = [task.record, GoBackwardTwice("")]
    losses = task.train(tmp_path / "fp16", config(stage, FP16), callbacks=callbacks)
    assert_trains_as_fp32(task, reference, losses, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_may_be_unused_in_fp16(tmp_path: Path, stage: int) -> None:
    model = {"type": "either_of_two_embedders", "embedding_dim": 12}
    reference, task = (Task(lr=0.1, momentum=0, **model) for _ in range(2))
    losses = task.train(tmp_path / "fp16", config(stage, OVERFLOWING))
    assert 0 in task.record.skipped
    reference.optimizer.skipped = task.record.skipped
    expected = reference.train(tmp_path / "fp32", None)
    assert_trains_as_fp32(task, reference, losses, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_penalty_is_computed_in_fp32(tmp_path: Path, stage: int) -> None:
    reference, task = Task(), Task()
    for each in (reference, task):
        # The sum of their squares is no number of fp16.
        each.model.penalized = torch.nn.Parameter(torch.full((1000,), 20.0))
        each.model._regularizer = RegularizerApplicator([("penalized", L2Regularizer(1e-5))])
        each.optimizer.add_param_group({"params": [each.model.penalized]})
        each.untrained = copy.deepcopy(each.model.state_dict())
    expected = reference.train(tmp_path / "fp32", None, num_epochs=1)
    losses = task.train(tmp_path / "fp16", config(stage, FP16), num_epochs=1)
    for key in ("training_loss", "training_reg_loss"):
        assert losses[key] == pytest.approx(expected[key], rel=2e-3)
    weights = [each.model.state_dict()["penalized"] - 20 for each in (task, reference)]
    assert weights[0] == pytest.approx(weights[1], rel=0.02)
    assert "get_regularization_penalty" not in vars(task.model)


class Interrupt(TrainerCallback):
    def __init__(self, step: Optional[int]) -> None:
        super().__init__("")
        self._step = step

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        if trainer._total_batches_completed == self._step:
            raise KeyError("on purpose")


class Scales(TrainerCallback):
    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.at_start = float(trainer.engine.optimizer.loss_scaler.cur_scale)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_training_of_another_precision_has_no_loss_scale_to_recover(
    tmp_path: Path, stage: int
) -> None:
    def scale(precision: Dict[str, Any]) -> float:
        scales = Scales("")
        checkpointer = DeepSpeedCheckpointer(tmp_path)
        Task().train(
            tmp_path, config(stage, precision), checkpointer=checkpointer, callbacks=[scales]
        )
        return scales.at_start

    scale({"bf16": {"enabled": True}})
    assert scale({"fp16": {"enabled": True, "initial_scale_power": 8}}) == 2**8


@pytest.mark.parametrize(
    "stage, precision", [(0, AUTOCAST), *((stage, OVERFLOWING) for stage in (0, 2, 3))]
)
def test_the_loss_scale_is_recovered(tmp_path: Path, stage: int, precision: Dict[str, Any]) -> None:
    uninterrupted, interrupted, recovered = Task(), Task(), Task()
    precision = config(stage, precision)
    uninterrupted.train(
        tmp_path / "uninterrupted", precision, callbacks=[uninterrupted.record, SetScale("")]
    )
    directory = tmp_path / "interrupted"

    def train(task: Task, interrupted_at: Optional[int] = None) -> None:
        task.train(
            directory,
            precision,
            checkpointer=DeepSpeedCheckpointer(directory, save_every_num_batches=5),
            callbacks=[task.record, SetScale(""), Interrupt(interrupted_at)],
        )

    with pytest.raises(KeyError, match="on purpose"):
        train(interrupted, interrupted_at=12)
    train(recovered)
    steps = len(uninterrupted.record.settings)
    after = steps - len(recovered.record.settings)
    assert any(step >= after for step in uninterrupted.record.skipped)
    assert {after + step for step in recovered.record.skipped} == {
        step for step in uninterrupted.record.skipped if step >= after
    }
    assert_same_weights(recovered.model.state_dict(), uninterrupted.model.state_dict(), 1e-6)


class Overflow(TrainerCallback):
    """On one rank, in one step."""

    reads_gradients = False

    def on_backward(self, trainer, batch_outputs, backward_called: bool, **kwargs: Any) -> bool:
        loss = batch_outputs["loss"]
        if trainer._total_batches_completed == 3 and trainer._rank == 1:
            loss = loss * 1e30
        trainer.engine.backward(loss, scale_wrt_gas=False)
        return True


@pytest.mark.parametrize("stage, precision", [(0, AUTOCAST), *((i, FP16) for i in (0, 2, 3))])
def test_an_overflow_on_one_rank_is_one_on_all(
    tmp_path: Path, stage: int, precision: Dict[str, Any]
) -> None:
    reference = Task()
    reference.optimizer.skipped = {3}
    reference.train(tmp_path / "fp32", None, num_epochs=1)

    task = Task()  # here, where the data isn't shared out to the workers

    def train(rank: int) -> Any:
        task.train(
            tmp_path / "fp16",
            config(stage, precision),
            num_epochs=1,
            distributed=True,
            local_rank=rank,
            world_size=2,
            callbacks=[task.record, Overflow("")],
        )
        return task.record.skipped

    assert run_workers(2, train) == [{3}, {3}]
    weights = torch.load(tmp_path / "fp16" / "best.th", weights_only=True)
    moved = {
        name: reference.model.state_dict()[name] - reference.untrained[name] for name in weights
    }
    assert_same_weights(
        {name: weights[name] - reference.untrained[name] for name in weights}, moved, TOLERANCE
    )


class OneLayer(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layer(inputs).square().sum()}


def test_elements_are_clipped_before_a_fused_step_under_autocast() -> None:
    def weights(is_fused: bool) -> Dict[str, torch.Tensor]:
        side = Side(
            OneLayer,
            lambda rank: [{"inputs": torch.ones(3, 8) * step} for step in range(1, 4)],
            0,
            deepspeed_config=AUTOCAST,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=is_fused),
            grad_clipping=0.5,
        )
        return side.train()

    assert_same_weights(weights(True), weights(False), tolerance=1e-6)
