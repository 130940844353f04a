"""
Weights that are changed outside the optimizer are those that the next step begins with.
"""

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules import Embedding
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.moving_average import ExponentialMovingAverage
from deepspeed import zero
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side
from tests.support.workers import run_workers

NUM_TOKENS = 17


class TargetNetwork(Model):
    """Learns to be far from a frozen copy of itself, whose weights are a moving average."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.online = nn.Linear(5, 3)
        self.target = nn.Linear(5, 3)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        distance = (self.online(x) - self.target(x) - 1) * self.scale
        return {"loss": distance.pow(2).mean()}


class Change(TrainerCallback):
    """Clamps some weights after each step, and moves the target."""

    def __init__(self, which: Optional[List[str]] = None) -> None:
        super().__init__("")
        self._which = which

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        if not kwargs["is_training"]:
            return
        if not isinstance(trainer, DeepSpeedTrainer):
            self._change(trainer.model)
            return
        with trainer.modified_weights(self._which):
            self._change(trainer.model)

    @staticmethod
    @torch.no_grad()
    def _change(model: Any) -> None:
        model.online.weight.clamp_(-0.2, 0.2)
        model.online.bias.data.mul_(0.9)
        for target, online in zip(model.target.parameters(), model.online.parameters()):
            target.mul_(0.7).add_(online, alpha=0.3)


class ChangeOutside(TrainerCallback):
    """Changes weights after one step, or after each from it on, where it would be lost."""

    def __init__(
        self,
        change: Callable[[Any], None],
        step: int = 2,
        only_on_rank: Optional[int] = None,
        is_repeated: bool = False,
    ) -> None:
        super().__init__("")
        self._change = change
        self._step = step
        self._only_on_rank = only_on_rank
        self._is_repeated = is_repeated
        self._num_steps = 0

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        self._num_steps += kwargs["is_training"]
        is_here = self._only_on_rank in (None, torch.distributed.get_rank())
        is_due = self._num_steps == self._step or (
            self._is_repeated and self._num_steps > self._step
        )
        if is_due and is_here:
            with torch.no_grad():
                self._change(trainer.model)


def _target_network() -> Model:
    return TargetNetwork(Vocabulary())


def _vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(3, 5, generator=generator)} for _ in range(6)]


@pytest.fixture(scope="module")
def changed() -> Dict[str, torch.Tensor]:
    return Side(_target_network, _vectors, world_size=2, callbacks=lambda: [Change()]).train()


@pytest.mark.parametrize("stage", range(4))
def test_changes_within_modified_weights_are_kept(changed: Dict[str, torch.Tensor], stage: int):
    side = Side(
        _target_network,
        _vectors,
        stage,
        world_size=2,
        callbacks=lambda: [Change(["online", "^target"])],
    )
    assert_same_weights(side.train(), changed)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_master_weights_are_changed_in_half_precision(stage: int):
    value = 1.0001  # in fp32 only

    class Set(TrainerCallback):
        def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
            with trainer.modified_weights():
                assert trainer.model.online.weight.dtype == torch.float32
                trainer.model.online.weight.fill_(value)
            assert trainer.model.online.weight.dtype != torch.float32

    side = Side(
        _target_network,
        _vectors,
        stage,
        deepspeed_config={"bf16": {"enabled": True}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        callbacks=lambda: [Set("")],
    )
    weights = side.train()
    assert torch.equal(weights["online.weight"], torch.full((3, 5), value))


def test_the_changes_of_rank_0_count():
    class Random(TrainerCallback):
        def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
            with trainer.modified_weights(["online.bias", trainer.model.scale]):
                trainer.model.online.bias.fill_(torch.distributed.get_rank())

    side = Side(_target_network, _vectors, 2, world_size=2, callbacks=lambda: [Random("")])
    assert side.train()["online.bias"].tolist() == [0, 0, 0]


def _clamp(model: Any) -> None:
    model.online.weight.clamp_(-0.1, 0.1)


def _clamp_data(model: Any) -> None:
    model.online.weight.data.clamp_(-0.1, 0.1)


def _zero_target(model: Any) -> None:
    model.target.weight.zero_()


class ChangeInEpoch(TrainerCallback):
    """Changes weights where PyTorch doesn't count it, after each epoch."""

    def on_epoch(self, trainer, *args: Any, **kwargs: Any) -> None:
        trainer.model.online.weight.data.clamp_(-0.1, 0.1)


class ModifyScale(TrainerCallback):
    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        with trainer.modified_weights("scale"):
            pass


@pytest.mark.parametrize("by", ["a moving average", "modified_weights"])
def test_a_change_is_an_error_before_it_is_written_over(by: str):
    def callbacks() -> List[TrainerCallback]:
        if by == "a moving average":
            return [ChangeInEpoch("")]
        return [ChangeOutside(_clamp_data, step=5), ModifyScale("")]

    side = Side(
        _target_network,
        _vectors,
        2,
        callbacks=callbacks,
        moving_average=_average if by == "a moving average" else lambda model: None,
        validation_data_loader=Batches(_vectors(1)),
    )
    (message,) = side.on_all_ranks(_error_of_training)
    assert "'online.weight'" in message


def test_weights_that_are_gathered_in_lower_precision_have_not_changed():
    Side(
        _target_network,
        _vectors,
        3,
        world_size=2,
        deepspeed_config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        log_every_num_steps=1,
        validation_data_loader=Batches(_vectors(1)),
    ).train()


@pytest.mark.parametrize(
    "stage, precision, change",
    [
        (2, "fp32", _clamp),
        (2, "fp32", _clamp_data),
        (1, "fp32", _clamp_data),
        (3, "fp32", _clamp),
        (3, "fp32", _zero_target),
        *((stage, "bf16", _clamp) for stage in range(4)),
    ],
)
def test_a_change_that_would_be_lost_ends_in_an_error_that_names_the_parameter(
    stage: int, precision: str, change: Callable[[Any], None]
):
    side = Side(
        _target_network,
        _vectors,
        stage,
        deepspeed_config={precision: {"enabled": True}} if precision != "fp32" else {},
        log_every_num_steps=3,
        # PyTorch doesn't count the changes through `.data`, and step 4 is the first that compares.
        callbacks=lambda: [ChangeOutside(change, is_repeated=change is _clamp_data)],
    )
    (message,) = side.on_all_ranks(_error_of_training)
    assert "'online.weight'" in message or "'target.weight'" in message


class ChangeInBackward(ChangeOutside):
    """Changes weights between the passes of one step."""

    def on_backward(self, trainer, *args: Any, **kwargs: Any) -> bool:
        super().on_batch(trainer, is_training=True)
        return False

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        pass


class ChangingTrainer(DeepSpeedTrainer):
    """Changes weights before one step."""

    def batch_outputs(self, batch: Any, for_training: bool) -> Any:
        if self.steps_completed == 2:
            _clamp_data(self.model)
        return super().batch_outputs(batch, for_training)


@pytest.mark.parametrize(
    "where, stage, world_size",
    [
        (ChangeOutside, 1, 1),
        (ChangeOutside, 2, 2),
        (ChangeOutside, 3, 2),
        (ChangeInBackward, 2, 1),
        (ChangeInBackward, 3, 1),
        (ChangingTrainer, 2, 1),
    ],
)
def test_a_single_change_that_pytorch_does_not_count_is_an_error(
    where: Any, stage: int, world_size: int
):
    is_trainer = where is ChangingTrainer
    side = Side(
        _target_network,
        _vectors,
        stage,
        world_size,
        zero={"stage3_param_persistence_threshold": 100},
        callbacks=lambda: [] if is_trainer else [where(_clamp_data, step=3)],
        trainer_class=where if is_trainer else DeepSpeedTrainer,
        log_every_num_steps=100,
    )
    for message in side.on_all_ranks(_error_of_training):
        assert "'online.weight'" in message


def test_weights_that_a_callback_has_changed_after_the_last_epoch_are_not_saved(tmp_path: Path):
    side = Side(
        _target_network,
        _vectors,
        2,
        num_epochs=1,
        callbacks=lambda: [ChangeInEpoch("")],
        checkpointer=DeepSpeedCheckpointer(tmp_path),
    )
    (message,) = side.on_all_ranks(_error_of_training, tmp_path)
    assert "'online.weight'" in message and not list(tmp_path.glob("checkpoint_*/commit.json"))


def _error_of_training(trainer: Any) -> str:
    with pytest.raises(RuntimeError, match="modified_weights") as error:
        trainer.train()
    return str(error.value)


class Scaled(Model):
    """Clamps its scale in each forward pass, as CLIP does."""

    def __init__(self, clamp: Callable[[nn.Parameter], torch.Tensor]) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(5, 3)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self._clamp = clamp

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.layer(x) * self._clamp(self.logit_scale)).square().mean()}


def _clamp_scale_in_place(scale: nn.Parameter) -> torch.Tensor:
    scale.data.clamp_(max=1.0)
    return scale


def _clamp_copy(scale: nn.Parameter) -> torch.Tensor:
    return torch.clamp(scale, max=1.0)


@pytest.mark.parametrize("stage, world_size", [(2, 2), (3, 1), (3, 2)])
def test_clamping_in_a_forward_pass_is_an_error_with_what_to_write_there(
    stage: int, world_size: int, expect_message: Callable[[str], None]
):
    side = Side(lambda: Scaled(_clamp_scale_in_place), _vectors, stage, world_size)
    messages = side.on_all_ranks(_error_of_training)
    expect_message(messages[0])  # rank 0 has the number, or its shard
    same = [Side(lambda: Scaled(_clamp_copy), _vectors, each, world_size) for each in (stage, None)]
    assert_same_weights(*(side.train() for side in same))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_change_on_one_rank_is_an_error_on_all(stage: int):
    side = Side(
        _target_network,
        _vectors,
        stage,
        world_size=2,
        # What stage 3 has released can't be changed in the first place.
        zero={"stage3_param_persistence_threshold": 100},
        callbacks=lambda: [ChangeOutside(_clamp, only_on_rank=1)],
    )
    first, second = side.on_all_ranks(_error_of_training)
    assert "on another rank" in first
    assert "'online.weight'" in second


class ChangeBeforeBackward(TrainerCallback):
    """Changes weights between the passes of the first step, where PyTorch doesn't count it."""

    def on_backward(self, trainer, *args: Any, **kwargs: Any) -> bool:
        if trainer.progress.total_batches_completed == 0:
            with zero.GatheredParameters([trainer.model.online.weight], modifier_rank=0):
                trainer.model.online.weight.data.clamp_(-0.1, 0.1)
        return False


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_change_after_a_release_is_an_error(world_size: int):
    side = Side(
        _target_network,
        _vectors,
        3,
        world_size=world_size,
        zero={"stage3_param_persistence_threshold": 0},
        callbacks=lambda: [ChangeBeforeBackward("")],
    )
    assert any("'online.weight'" in message for message in side.on_all_ranks(_error_of_training))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_change_on_one_rank_after_the_last_step_is_an_error_on_all_too(world_size: int):
    side = Side(
        _target_network,
        _vectors,
        2,
        world_size=world_size,
        num_epochs=1,
        callbacks=lambda: [ChangeOutside(_clamp_data, step=6, only_on_rank=world_size - 1)],
    )
    *others, own = side.on_all_ranks(_error_of_training)
    assert all("on another rank" in other for other in others) and "'online.weight'" in own


@pytest.mark.parametrize("stage", [0])
def test_a_change_is_kept_where_the_optimizer_steps_the_weights_themselves(stage: int):
    sides = [
        Side(_target_network, _vectors, each, callbacks=lambda: [ChangeOutside(_clamp)])
        for each in (stage, None)
    ]
    assert_same_weights(*(side.train() for side in sides))


class Tokens(Model):
    """Embeddings whose rows are to be short: one trained, one frozen, one with another norm."""

    def __init__(self, vocab: Vocabulary, has_max_norm: bool) -> None:
        super().__init__(vocab)
        lengths = [0.8, 0.7, 0.9] if has_max_norm else [None, None, None]
        self.embedding = Embedding(3, num_embeddings=NUM_TOKENS, max_norm=lengths[0])
        self.frozen = nn.Embedding(NUM_TOKENS, 3, max_norm=lengths[1])
        self.frozen.weight.requires_grad_(False)
        self.bag = nn.EmbeddingBag(NUM_TOKENS, 5, max_norm=lengths[2], norm_type=1.0)
        self.layer = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        embedded = (self.embedding(tokens) + self.frozen(tokens)).mean(dim=1)
        scores = self.layer(torch.cat([embedded, self.bag(tokens)], dim=1))
        return {"loss": (scores - 3).pow(2).mean()}


def tokens_model(has_max_norm: bool = True) -> Model:
    return Tokens(Vocabulary(), has_max_norm)


def token_batches(rank: int, seed: int = 0) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [{"tokens": torch.randint(0, NUM_TOKENS, (2, 3), generator=generator)} for _ in range(4)]


@pytest.mark.parametrize("stage", [0])
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_kept_within_max_norm_as_pytorch_does(world_size: int, stage: int):
    """With two workers as `DistributedDataParallel` does: each scales the rows that it looks up."""
    expected, actual = (
        Side(
            tokens_model,
            token_batches,
            each,
            world_size,
            num_gradient_accumulation_steps=2,
            validation_data_loader=Batches(token_batches(0, seed=1)),
        )
        for each in (None, stage)
    )
    for plain, ours in zip(expected.on_all_ranks(_weights), actual.on_all_ranks(_weights)):
        assert_same_weights(_as_tensors(ours), _as_tensors(plain))


def _weights(trainer: Any) -> Dict[str, Any]:
    trainer.train()
    # Not as tensors, which workers would share with the test.
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}


def _as_tensors(arrays: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "stage, sections",
    [(1, {}), (2, {}), (3, {}), (0, {"bf16": {"enabled": True}}), (0, {"fp16": {"enabled": True}})],
)
def test_max_norm_is_refused_where_the_optimizer_updates_other_tensors(
    stage: int, sections: Dict[str, Any]
):
    def construct(rank: int) -> None:
        side = Side(tokens_model, token_batches, stage, deepspeed_config=sections)
        with pytest.raises(ConfigurationError, match="'embedding' has 'max_norm'.*\"stage\": 0"):
            side.construct(rank, None)

    run_workers(1, construct)


class ReadElsewhere(Model):
    """Reads the weight of an embedding with `max_norm` in another layer and in a penalty."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.embedding = nn.Embedding(NUM_TOKENS, 3, max_norm=0.8)
        self.output = nn.Linear(3, NUM_TOKENS)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        scores = self.output(self.embedding(tokens[:, :1]).tanh()).flatten(end_dim=1)
        loss = nn.functional.cross_entropy(scores, tokens[:, 1])
        return {"loss": loss + 0.1 * self.embedding.weight.pow(2).mean()}


@pytest.mark.parametrize("stage, world_size", [(0, 1), (0, 2)])
def test_rows_within_max_norm_are_read_elsewhere_as_pytorch_does(stage: int, world_size: int):
    model = lambda: ReadElsewhere(Vocabulary())  # noqa: E731
    expected, actual = (
        Side(model, token_batches, each, world_size).on_all_ranks(_weights)
        for each in (None, stage)
    )
    for plain, ours in zip(expected, actual):
        assert_same_weights(_as_tensors(ours), _as_tensors(plain))


class ScaledInForward(Model):
    """Looks rows up as an embedding with `max_norm` does, without one."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.rows = nn.Parameter(torch.ones(NUM_TOKENS, 3))
        self.layer = nn.Linear(3, 1)

    def forward(self, tokens: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        rows = nn.functional.embedding(tokens, self.rows, max_norm=0.5)
        return {"loss": (self.layer(rows) - 3).pow(2).mean()}


@pytest.mark.parametrize("stage, world_size", [(2, 1), (3, 2)])
def test_rows_that_the_model_itself_scales_are_an_error_where_it_would_be_lost(
    stage: int, world_size: int
):
    model = lambda: ScaledInForward(Vocabulary())  # noqa: E731
    for message in Side(model, token_batches, stage, world_size).on_all_ranks(_error_of_training):
        assert "'rows'" in message


def _average(model: Model) -> ExponentialMovingAverage:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ExponentialMovingAverage(trained, 0.6)


def test_a_frozen_target_may_change_beside_a_moving_average_of_what_is_trained():
    def side(stage: Optional[int]) -> Side:
        return Side(
            _target_network,
            _vectors,
            stage,
            callbacks=lambda: [Change()],
            moving_average=_average,
        )

    assert_same_weights(side(2).train(), side(None).train())


@pytest.mark.parametrize("which", [slice(1), slice(None)], ids=["some", "frozen ones too"])
def test_a_moving_average_of_others_than_the_trained_weights_is_refused(which: slice):
    def average(model: Model) -> ExponentialMovingAverage:
        return ExponentialMovingAverage(list(model.named_parameters())[which], 0.6)

    def construct(rank: int) -> None:
        with pytest.raises(ConfigurationError, match="must average all trainable"):
            Side(_target_network, _vectors, 2, moving_average=average).construct(rank, None)

    run_workers(1, construct)


class OneWeight(Model):
    """Has a single parameter, as an embedding alone, of which ZeRO's flat buffer is a view."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.weight = nn.Parameter(torch.ones(8, 5))

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (x @ self.weight.t() - 1).square().mean()}


def _clamp_weight(model: Any) -> None:
    model.weight.clamp_(-0.1, 0.1)


def test_a_single_parameter_trains_and_a_change_of_it_is_an_error():
    def side(stage: Optional[int], **arguments: Any) -> Side:
        model = lambda: OneWeight(Vocabulary())  # noqa: E731
        return Side(model, _vectors, stage, world_size=2, log_every_num_steps=3, **arguments)

    assert_same_weights(side(2).train(), side(None).train())
    average = {"moving_average": _average, "validation_data_loader": Batches(_vectors(0))}
    assert_same_weights(side(2, **average).train(), side(None, **average).train())
    for arguments in ({}, average):
        changing = side(2, callbacks=lambda: [ChangeOutside(_clamp_weight)], **arguments)
        first, second = changing.on_all_ranks(_error_of_training)
        assert "'weight'" in first and "'weight'" in second


class ClampInValidation(OneWeight):
    """Changes the weights that a validation replaces, which are lost then."""

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if not self.training:
            with torch.no_grad():
                _clamp_weight(self)
        return super().forward(x)


def test_a_change_of_averages_is_an_error():
    for message in Side(
        lambda: ClampInValidation(Vocabulary()),
        _vectors,
        2,
        world_size=2,
        moving_average=_average,
        validation_data_loader=Batches(_vectors(0)),
    ).on_all_ranks(_error_of_training):
        assert "'weight'" in message
