"""
Saving a checkpoint while training goes on.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

import pytest
import torch
import torch.distributed as dist
from allennlp.common import Lazy, Params
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.moving_average import ExponentialMovingAverage
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    ModelSize,
    ModelStates,
    model_states,
    optimizer_bytes,
)
from allennlp_deepspeed.engine.parameters import full_parameters
from tests.support.communication import CommunicationCounter, Traffic
from tests.support.side_by_side import Batches, Side, error_of_training, state_arrays, trained
from tests.support.state_files import saved_tensors
from tests.support.tensor_memory import TensorMemory
from tests.support.workers import run_workers

DIM = 8


class TwoLayers(Model):
    """All but the weights of the first layer are small, and one of these isn't trained."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.layers[2].bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layers(inputs).square().mean()}


def batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(6, DIM, generator=generator)} for _ in range(3)]


class Save(TrainerCallback):
    """After the second step, and counts what crosses the network for it."""

    def __init__(self, serialization_dir: Path) -> None:
        super().__init__(str(serialization_dir))
        self.counter = CommunicationCounter()
        self.elements: List[int] = []  # of each parameter that this rank has after the save

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.engine.global_steps != 2 or self.counter.read():
            return
        checkpointer = DeepSpeedCheckpointer(self.serialization_dir)
        with self.counter:
            checkpointer.save_checkpoint(trainer)
        self.elements = [
            parameter.numel() if parameter.ds_status is ZeroParamStatus.AVAILABLE else 0
            for parameter in trainer.model.parameters()
        ]
        checkpointer.finish()


def train_and_save(trainer: Any) -> Tuple[Dict[str, Any], List[int], Dict[str, Traffic]]:
    (save,) = (callback for callback in trainer.callbacks if isinstance(callback, Save))
    return trained(trainer), save.elements, save.counter.read()


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="the process groups of this PyTorch have no hooks",
)
def test_a_save_gathers_nothing(tmp_path: Path) -> None:
    zero = {"stage3_param_persistence_threshold": DIM}
    arguments: Any = {"world_size": 2, "zero": zero}
    without = Side(TwoLayers, batches, 3, **arguments).on_all_ranks(trained)
    saving = Side(TwoLayers, batches, 3, callbacks=lambda: [Save(tmp_path)], **arguments)
    for (weights, elements, traffic), expected in zip(
        saving.on_all_ranks(train_and_save), without, strict=True
    ):
        assert traffic and not any("gather" in name for name in traffic)
        assert elements == [0, DIM, DIM, 1]
        assert all((weights[name] == expected[name]).all() for name in expected)
    saved = saved_tensors(tmp_path / "checkpoint_e0_b2")
    assert saved.keys() == expected.keys()


class Judged(TwoLayers):
    """Each validation has one of these losses."""

    losses = (3.0, float("nan"), 1.0, 2.0, 1.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.num_validations = 0

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        output = super().forward(inputs)
        if not self.training:
            output["loss"] = torch.tensor(self.losses[self.num_validations])
            self.num_validations += 1
        return output


@pytest.mark.parametrize("world_size, lengths", [(1, [6]), (1, [2, 6]), (2, [4, 5, 6])])
def test_the_best_checkpoints_are_kept_beside_the_newest(
    world_size: int, lengths: List[int], tmp_path: Path
) -> None:
    for num_epochs in lengths:
        checkpointer = DeepSpeedCheckpointer(
            tmp_path, keep_most_recent_by_count=1, keep_best_by_count=2
        )
        Side(
            Judged,
            batches,
            2,
            world_size,
            num_epochs=num_epochs,
            validation_data_loader=Batches(batches(0)[:1]),
            checkpointer=checkpointer,
        ).train(tmp_path)
    # NaN isn't among the best, and of equal ones the earlier are.
    names = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    assert names == ["checkpoint_e3_b0", "checkpoint_e5_b0", "checkpoint_e6_b0"]


class Preempted(TwoLayers):
    """Gets a SIGTERM in the first step."""

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(inputs)


def keep_best(
    directory: Path, every: int, world_size: int = 1, model: Type[Model] = TwoLayers
) -> Side:
    """Saves each step, and keeps the newest checkpoint and the best, that of the highest loss."""
    return Side(
        model,
        lambda rank: 2 * batches(0),
        2,
        world_size,
        num_epochs=1,
        # So small that each step decreases the loss.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        validation_data_loader=Batches(batches(0)),
        validation_metric="+loss",
        validate_every_num_batches=every,
        checkpointer=DeepSpeedCheckpointer(
            directory,
            save_every_num_batches=1,
            save_on_preemption=True,
            keep_most_recent_by_count=1,
            keep_best_by_count=1,
        ),
    )


def test_the_best_checkpoint_is_kept_if_it_is_validated_after_a_preemption(tmp_path: Path) -> None:
    stopped = keep_best(tmp_path, every=1, model=Preempted)
    (message,) = stopped.on_all_ranks(error_of_training, tmp_path)
    assert message.startswith("TrainingInterrupted")
    keep_best(tmp_path, every=1).train(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    assert names == ["checkpoint_e0_b1", "checkpoint_e1_b0"]


def test_a_checkpoint_does_not_have_the_score_of_a_former_one_of_its_name(tmp_path: Path) -> None:
    """Twice as many workers resume after 2 steps instead of 4, and validate after 3."""
    keep_best(tmp_path, every=4).train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint_e1_b0")
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_e0_b4"]
    keep_best(tmp_path, every=3, world_size=2).train(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    assert names == ["checkpoint_e0_b3", "checkpoint_e1_b0"]


class ListCheckpoints(TrainerCallback):
    """What a callback finds that copies the directory in the end."""

    def on_end(self, *args: Any, **kwargs: Any) -> None:
        self.found = sorted(path.name for path in Path(self.serialization_dir).glob("checkpoint*"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_checkpoints_are_committed_when_callbacks_end(world_size: int, tmp_path: Path) -> None:
    def train_and_list(trainer: Any) -> List[str]:
        trainer.train()
        (callback,) = (each for each in trainer.callbacks if isinstance(each, ListCheckpoints))
        return callback.found

    side = Side(
        TwoLayers,
        batches,
        2,
        world_size,
        callbacks=lambda: [ListCheckpoints(str(tmp_path))],
        checkpointer=DeepSpeedCheckpointer(tmp_path, keep_most_recent_by_count=2),
    )
    checkpoints = ["checkpoint_e1_b0", "checkpoint_e2_b0"]
    assert side.on_all_ranks(train_and_list, tmp_path) == [checkpoints] * world_size


# What isn't finite


def third_is_nan(rank: int) -> List[Dict[str, torch.Tensor]]:
    first, second, third = batches(rank)
    return [first, second, {"inputs": third["inputs"] * (float("nan") if rank == 0 else 1)}, first]


class SaveEachStep(TrainerCallback):
    """And when training ends. It may change weights before."""

    def __init__(self, changes_weights: bool = False) -> None:
        super().__init__("")
        self.changes_weights = changes_weights

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.changes_weights and trainer.steps_completed == 3:
            with trainer.modified_weights():
                trainer.model.layers[0].weight[0, 0] = float("inf")
        trainer.checkpointer.save_checkpoint(trainer)

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.checkpointer.save_checkpoint(trainer)


class SaveAtTheEnd(SaveEachStep):
    """Of what the checkpointer has found to be NaN."""

    def on_batch(self, *args: Any, **kwargs: Any) -> None:
        pass


class OwnTimes(DeepSpeedCheckpointer):
    def maybe_save_checkpoint(self, trainer: Any, *args: Any) -> bool:  # type: ignore[override]
        self.save_checkpoint(trainer)
        return True


def errors(trainer: Any) -> List[str]:
    """Of training, and of saving afterwards."""
    found = []
    for act in (trainer.train, lambda: trainer.checkpointer.save_checkpoint(trainer)):
        with pytest.raises(ValueError) as error:
            act()
        found.append(type(error.value).__name__)
    trainer.checkpointer.finish()
    return found


@pytest.mark.parametrize(
    "stage, world_size, precision",
    [(0, 1, "fp32"), (2, 2, "fp32"), (3, 2, "bf16"), (0, 2, "bf16")],
)
@pytest.mark.parametrize("door", ["checkpointer", "callback", "end", "changed weights"])
def test_nothing_that_is_not_finite_is_saved(
    door: str, stage: int, world_size: int, precision: str, tmp_path: Path
) -> None:
    kind = OwnTimes if door == "checkpointer" else DeepSpeedCheckpointer
    each_step, at_end = SaveEachStep(door == "changed weights"), SaveAtTheEnd()
    side = Side(
        TwoLayers,
        batches if door == "changed weights" else third_is_nan,
        stage,
        world_size,
        deepspeed_config={"bf16": {"enabled": True}} if precision == "bf16" else {},
        callbacks=lambda: {"checkpointer": [], "end": [at_end]}.get(door, [each_step]),
        checkpointer=kind(
            tmp_path,
            keep_most_recent_by_count=1,
            save_every_num_batches=2 if door == "end" else None,
        ),
        log_every_num_steps=100,
    )
    of_ranks = side.on_all_ranks(errors, tmp_path)
    assert of_ranks == [["NotANumberError", "NotANumberError"]] * world_size
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_e0_b2"]
    saved = saved_tensors(tmp_path / "checkpoint_e0_b2")
    assert saved and all(tensor.isfinite().all() for tensor in saved.values())


class SaveInValidation(TrainerCallback):
    """And in the end, each time with a moving average in the place of the weights."""

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if is_training:
            self.weights = state_arrays(trainer)
        else:
            trainer.checkpointer.save_checkpoint(trainer)

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.checkpointer.save_checkpoint(trainer)


@pytest.mark.parametrize("stage, world_size", [(0, 1), (2, 2)])
def test_a_save_during_evaluation_is_of_the_weights_of_training(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    arguments: Any = {
        "stage": stage,
        "world_size": world_size,
        "moving_average": lambda model: ExponentialMovingAverage(
            [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        ),
        "validation_data_loader": Batches(batches(0)),
        "num_epochs": 1,
    }
    expected = Side(TwoLayers, batches, **arguments).train()
    kept = DeepSpeedCheckpointer(tmp_path, save_completed_epochs=False)
    saving = Side(
        TwoLayers,
        batches,
        callbacks=lambda: [SaveInValidation("")],
        checkpointer=kept,
        **arguments,
    )
    ((actual, of_training), *_) = saving.on_all_ranks(
        lambda trainer: (trained(trainer), trainer.callbacks[0].weights), tmp_path
    )
    assert all((expected[name].numpy() == actual[name]).all() for name in expected)
    assert any((of_training[name] != actual[name]).any() for name in expected)
    saved = saved_tensors(tmp_path / "checkpoint_e1_b0")
    assert all((saved[name].numpy() == of_training[name].ravel()).all() for name in expected)


class SaveAt(TrainerCallback):
    """Asks for a checkpoint where one can't be resumed from, in the first run."""

    def __init__(self, place: str) -> None:
        super().__init__("")
        self.place = place

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if self.place == "validation" and not is_training:
            trainer.checkpointer.save_checkpoint(trainer)

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.place == "epoch":
            trainer.checkpointer.save_checkpoint(trainer)

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.place == "end":
            trainer.checkpointer.save_checkpoint(trainer)


@pytest.mark.parametrize(
    "place, every, points",
    [
        ("validation", None, ["e1_b0"]),
        ("validation", 2, ["e0_b2", "e1_b0"]),
        ("epoch", None, ["e1_b0"]),
        ("epoch", 2, ["e1_b0"]),
        ("end", None, ["e1_b0"]),
        ("end", 2, []),  # the best weights, which aren't the last, are in their place
    ],
)
@pytest.mark.parametrize("stage, world_size", [(0, 1), (2, 2)])
def test_training_resumes_from_what_a_callback_has_saved(
    stage: int, world_size: int, place: str, every: Optional[int], points: List[str], tmp_path: Path
) -> None:
    def train(num_epochs: int, directory: Path, place: str = "") -> Any:
        def results(trainer: Any) -> Any:
            weights = trained(trainer)
            rates = [group["lr"] for group in trainer.engine.basic_optimizer.param_groups]
            return weights, rates, trainer._metric_tracker.state_dict()

        side = Side(
            Judged,
            batches,
            stage,
            world_size,
            num_epochs=num_epochs,
            learning_rate_scheduler=Lazy(
                LearningRateScheduler, Params({"type": "step", "step_size": 1, "gamma": 0.5})
            ),
            validation_data_loader=Batches(batches(0)[:1]),
            validate_every_num_batches=every,
            checkpointer=DeepSpeedCheckpointer(directory, save_completed_epochs=False),
            callbacks=lambda: [SaveAt(place)],
        )
        return side.on_all_ranks(results, directory)

    train(1, tmp_path / "resumed", place)
    saved = sorted(path.name for path in (tmp_path / "resumed").glob("checkpoint_*"))
    assert saved == [f"checkpoint_{point}" for point in points]
    resumed, expected = train(3, tmp_path / "resumed"), train(3, tmp_path / "uninterrupted")
    for (weights, *others), (weights_expected, *others_expected) in zip(
        resumed, expected, strict=True
    ):
        assert others == others_expected
        assert all((weights[name] == weights_expected[name]).all() for name in weights)


class SavesNothing(DeepSpeedCheckpointer):
    """But what it is asked for."""

    def maybe_save_checkpoint(self, *args: Any) -> bool:
        return False


class ValidatesItself(TrainerCallback):
    """After the first step, as there was no other way to within an epoch."""

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if is_training and trainer.engine.global_steps == 1:
            with torch.no_grad():
                trainer._validation_loss(0)
            trainer.model.train()


class SavesElsewhere(TrainerCallback):
    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        DeepSpeedCheckpointer(self.serialization_dir).save_checkpoint(trainer)


def side_of(directory: Path, kind: Type[DeepSpeedCheckpointer], callback: Any) -> Side:
    return Side(
        TwoLayers,
        batches,
        2,
        2,
        num_epochs=1,
        validation_data_loader=Batches(batches(0)[:1]),
        checkpointer=kind(directory, save_completed_epochs=False, save_every_num_batches=2),
        callbacks=lambda: [callback],
    )


@pytest.mark.parametrize(
    "kind, callback, point",
    [
        (SavesNothing, SaveAt("epoch"), "e1_b0"),
        (DeepSpeedCheckpointer, ValidatesItself(""), "e0_b2"),
    ],
)
def test_what_is_due_is_saved(kind: Any, callback: Any, point: str, tmp_path: Path) -> None:
    side_of(tmp_path, kind, callback).train(tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == [f"checkpoint_{point}"]


def test_what_nothing_would_save_is_refused(tmp_path: Path) -> None:
    side = side_of(tmp_path, SavesNothing, SavesElsewhere(str(tmp_path)))
    (message,) = set(side.on_all_ranks(error_of_training, tmp_path))
    assert message.startswith("RuntimeError")


class Wide(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(nn.Linear(DIM, 4096), nn.Tanh(), nn.Linear(4096, 64))

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layers(inputs).square().mean()}


class Memory(NamedTuple):
    """Bytes of rank 0: counted in training and in a gather, and estimated."""

    peak: int
    gathered: int
    states: ModelStates


def average_of(model: Model) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(model.named_parameters())


class WaitsForFiles(DeepSpeedCheckpointer):
    """Else the copies are freed at a time of the writing thread's own."""

    def save_checkpoint(self, trainer: Any) -> None:
        super().save_checkpoint(trainer)
        self.finish()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averages_and_copies_take_the_memory_that_is_estimated(stage: int, tmp_path: Path) -> None:
    def train(trainer: Any) -> Tuple[int, ModelStates]:
        trainer.train()
        size = ModelSize.from_model(trainer.engine.module)
        adam = optimizer_bytes(torch.optim.Adam, {}, size)
        has: Any = {"has_moving_average": True, "saves_asynchronously": True}
        states = model_states(size, adam, trainer.resolved_config, 2, **has)
        with TensorMemory() as memory:
            full_parameters.full_state_dict(trainer.wrapped_model.shards, keep=False)
        assert stage == 0 or memory.peak == pytest.approx(4 * size.largest_parameter, rel=0.05)
        return memory.peak, states

    def memory(directory: Path, **arguments: Any) -> Memory:
        def count(rank: int) -> Memory:
            with TensorMemory() as memory:
                gathered, states = side.on_rank(rank, train, directory)
            return Memory(memory.peak, gathered, states)

        side = Side(
            Wide,
            batches,
            stage,
            world_size=2,
            optimizer=torch.optim.Adam,
            checkpointer=WaitsForFiles(directory, async_save=True),
            **arguments,
        )
        return run_workers(2, count)[0]

    averaged = memory(tmp_path / "averaged", moving_average=average_of)
    without = memory(tmp_path / "without")
    states = averaged.states
    assert averaged.peak - without.peak == pytest.approx(states.gpu.average, rel=0.1)
    # The files of rank 0, that are written from copies.
    files = [
        path
        for path in (tmp_path / "averaged" / "checkpoint_e2_b0").rglob("*")
        if path.suffix in (".safetensors", ".th") and path.name != "best.th"
        if "rank_1" not in path.name and "_w1" not in path.name
    ]
    assert sum(path.stat().st_size for path in files) == pytest.approx(states.cpu.saves, rel=0.1)
