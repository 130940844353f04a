"""What training takes from a checkpoint, and what it leaves as it is now."""

import copy
import json
import re
import shutil
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.models import BasicClassifier, Model, MultiTaskModel
from allennlp.models.heads import Head
from allennlp.modules import Backbone
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import ShouldValidateCallback, TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.metrics import Average
from torch import nn

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord, FileRecord
from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.state_files import StateFiles
from tests.fixtures.malicious import Malicious
from tests.integration.attribute_states_test import WithSchedulers
from tests.integration.trainer_test import Task
from tests.support.experiment import StateDict, assert_same_weights, load_config
from tests.support.side_by_side import Batches, Side, error_of_training


class Counting(BasicClassifier):
    """A classifier whose loss has a constant, and that counts how often it is trained."""

    scale: float
    num_passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        if self.training:
            self.num_passes += 1
        return {**output, "loss": output["loss"] * self.scale}


def train(directory: Path, num_epochs: int, scale: float = 1.0, **changes: Any) -> Counting:
    """Trains on from what is in the directory."""
    task = Task()
    task.model.__class__ = Counting
    task.model.scale = scale
    checkpointer = DeepSpeedCheckpointer(directory, keep_most_recent_by_count=None)
    arguments = {**task.arguments(directory), "num_epochs": num_epochs, **changes}
    DeepSpeedTrainer(**arguments, checkpointer=checkpointer).train()
    return task.model


@pytest.mark.parametrize("stage", range(4))
def test_recovery_keeps_a_constant_that_was_changed(tmp_path: Path, stage: int):
    config = {"deepspeed_config": {"zero_optimization": {"stage": stage}}}
    num_passes = train(tmp_path, num_epochs=1, **config).num_passes
    model = train(tmp_path, num_epochs=2, scale=0.5, **config)
    assert model.scale == 0.5
    assert model.num_passes == 2 * num_passes > 0


class ReadingLosses(DeepSpeedTrainer):
    """Reads the training loss of each epoch."""

    losses: List[float] = []

    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        metrics = super()._train_epoch(epoch)
        self.losses.append(metrics["loss"])
        return metrics


def test_a_subclass_reads_the_losses_of_epochs_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    losses = []
    for num_epochs in (1, 2, 3):
        monkeypatch.setattr(ReadingLosses, "losses", [])
        arguments = {**Task().arguments(tmp_path), "num_epochs": num_epochs}
        ReadingLosses(
            **arguments,
            checkpointer=DeepSpeedCheckpointer(tmp_path),
            deepspeed_config={"zero_optimization": {"stage": 3}},
        ).train()
        losses.append(ReadingLosses.losses)
    assert [len(each) for each in losses] == [1, 2, 3]
    assert losses[2][:2] == losses[1] and losses[1][:1] == losses[0]


@pytest.mark.parametrize("start, interval", [(None, 2), (1, 3)])
def test_metrics_of_each_epoch_are_those_of_a_run_that_does_not_validate_each(
    tmp_path: Path, start: Optional[int], interval: int
):
    """The metrics of a file include those of the last validation and of the best epoch."""

    def metrics_of(name: str, *lengths: int) -> List[Dict[str, Any]]:
        directory = str(tmp_path / name)
        for num_epochs in lengths:
            callback = ShouldValidateCallback(directory, start, interval)
            arguments = {
                **Task().arguments(tmp_path / name),
                "num_epochs": num_epochs,
                "callbacks": [callback],
            }
            if name == "allennlp":
                GradientDescentTrainer(**arguments).train()
            else:
                checkpointer = DeepSpeedCheckpointer(directory)
                DeepSpeedTrainer(**arguments, checkpointer=checkpointer).train()
        files = [tmp_path / name / f"metrics_epoch_{epoch}.json" for epoch in range(5)]
        return [of_experiment(json.loads(file.read_text())) for file in files]

    resumed = metrics_of("resumed", 1, 4, 5)
    assert resumed == metrics_of("uninterrupted", 5)
    for actual, expected in zip(resumed, metrics_of("allennlp", 5)):
        assert actual == pytest.approx(expected, abs=1e-5)
    assert len({metrics["best_epoch"] for metrics in resumed}) > 1


def of_experiment(metrics: Dict[str, Any]) -> Dict[str, Any]:
    return {k: v for k, v in metrics.items() if not re.search("duration|memory", k)}


def train_in_turn(directory: Path, num_epochs: int, stage: int, **changes: Any) -> StateDict:
    """On parts of the data that go on where those of the epoch before have ended."""
    task = Task()
    config = load_config("classifier")
    reader = DatasetReader.from_params(Params(config["dataset_reader"]))
    loaders = [
        MultiProcessDataLoader(
            reader, config[path], batch_size=4, shuffle=True, batches_per_epoch=3
        )
        for path in ("train_data_path", "validation_data_path")
    ]
    for loader in loaders:
        loader.index_with(task.model.vocab)
    task.data_loader, task.validation_data_loader = loaders
    arguments = {**task.arguments(directory), "num_epochs": num_epochs, **changes}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    DeepSpeedTrainer(
        **arguments,
        checkpointer=DeepSpeedCheckpointer(directory),
        deepspeed_config={"zero_optimization": zero},
        validate_every_num_batches=2 if stage > 1 else None,
    ).train()
    return task.model.state_dict()


@pytest.mark.parametrize("stage", range(4))
def test_data_that_keep_their_place_are_at_it_after_recovery(tmp_path: Path, stage: int):
    expected = train_in_turn(tmp_path / "uninterrupted", 3, stage)
    train_in_turn(tmp_path / "recovered", 1, stage)
    assert_same_weights(train_in_turn(tmp_path / "recovered", 3, stage), expected, tolerance=0)
    losses = [
        json.loads((tmp_path / name / f"metrics_epoch_{epoch}.json").read_text())["validation_loss"]
        for name in ("recovered", "uninterrupted")
        for epoch in range(3)
    ]
    assert losses[:3] == losses[3:]


def test_a_validation_without_its_metric_is_repeated_on_the_same_data(tmp_path: Path):
    train_in_turn(tmp_path / "uninterrupted", 2, 2)
    with pytest.raises(ConfigurationError):
        train_in_turn(tmp_path / "recovered", 2, 2, validation_metric="+acuracy")
    train_in_turn(tmp_path / "recovered", 2, 2)
    losses = [
        json.loads((tmp_path / name / f"metrics_{point}.json").read_text())["validation_loss"]
        for name in ("recovered", "uninterrupted")
        for point in ("e0_b2", "epoch_0", "e1_b2", "epoch_1")
    ]
    assert losses[:4] == losses[4:]


# State of the model


DIM = 4


def vectors(rank: int) -> List[Dict[str, Any]]:
    """Two workers with them train as one process does."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.rand(3, DIM, generator=generator)} for _ in range(4)]


class Tally(nn.Module):
    """Divides by a count that only `get_extra_state` has, as a tensor or as a list."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor, self.counts = as_tensor, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts[0] += 1
        return x / self.counts[0]

    def get_extra_state(self) -> Any:
        return torch.tensor(self.counts) if self.as_tensor else list(self.counts)

    def set_extra_state(self, state: Any) -> None:
        self.counts = [int(count) for count in state]


class Remembering(Model):
    """The loss depends on frozen weights, extra states, and buffers of all kinds."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), scale), requires_grad=False)
        self.tallies = nn.Sequential(Tally(as_tensor=True), Tally(as_tensor=False))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(DIM), persistent=False)
        self.register_buffer("spread", torch.ones(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if "first" not in dict(self.named_buffers()):
            self.register_buffer("first", x.mean(0), persistent=False)
        if self.training:
            self.steps += 1
            self.centre = self.centre * 0.9 + x.mean(0) * 0.1
            self.spread.mul_(0.9)
        centred = (x - self.centre - self.first) * self.spread
        output = self.tallies(self.layer(centred)) * self.scale
        return {"loss": (output - self.steps).pow(2).mean()}


def remember(
    directory: Path, num_epochs: int, stage: int, world_size: int, scale: float = 1.0, **more: Any
) -> StateDict:
    directory.mkdir(exist_ok=True)
    return Side(
        lambda: Remembering(scale),
        vectors,
        stage,
        world_size,
        num_epochs=num_epochs,
        checkpointer=DeepSpeedCheckpointer(directory),
        **more,
    ).train(directory)


@pytest.mark.parametrize(
    "stage, world_size, is_constructed_partitioned",
    [(0, 1, False), (1, 2, False), (3, 2, True)],
)
def test_buffers_that_are_not_persistent_are_as_without_an_interruption(
    tmp_path: Path, stage: int, world_size: int, is_constructed_partitioned: bool
):
    more: Any = {"is_constructed_partitioned": is_constructed_partitioned}
    expected = remember(tmp_path / "uninterrupted", 2, stage, world_size, **more)
    remember(tmp_path / "resumed", 1, stage, world_size, **more)
    actual = remember(tmp_path / "resumed", 2, stage, world_size, **more)
    assert_same_weights(actual, expected, tolerance=0)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_run_without_steps_left_has_the_model_of_its_end(tmp_path: Path, num_epochs: int):
    """The `num_passes`, which no evaluation after `--recover` may begin without."""
    train(tmp_path, num_epochs=num_epochs)
    expected = num_epochs * len(Task().arguments(tmp_path)["data_loader"])
    assert train(tmp_path, num_epochs=num_epochs).num_passes == expected


class Freezing(TrainerCallback):
    """Freezes a layer that was trained in the first epoch, or trains one that was frozen in it."""

    def __init__(self, thaws: bool) -> None:
        super().__init__("")
        self._thaws = thaws

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.model.layer.requires_grad_(not self._thaws)

    def on_epoch(self, trainer: Any, *args: Any, epoch: int, **kwargs: Any) -> None:
        if epoch == 0:
            trainer.model.layer.requires_grad_(self._thaws)


class TwoLayers(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.last(self.layer(x)) - 1).pow(2).mean()}


@pytest.mark.parametrize("thaws", [True, False])
def test_what_a_callback_has_frozen_is_resumed(tmp_path: Path, thaws: bool):
    def train(directory: Path, num_epochs: int) -> StateDict:
        directory.mkdir(exist_ok=True)
        return Side(
            TwoLayers,
            vectors,
            0,
            num_epochs=num_epochs,
            callbacks=lambda: [Freezing(thaws)],
            checkpointer=DeepSpeedCheckpointer(directory),
        ).train(directory)

    expected = train(tmp_path / "uninterrupted", 4)
    train(tmp_path / "resumed", 2)
    assert_same_weights(train(tmp_path / "resumed", 4), expected, tolerance=0)


@pytest.mark.parametrize("stage, before, after", [(1, 1, 2), (2, 2, 1), (3, 1, 2), (3, 2, 1)])
def test_all_state_of_the_model_is_resumed_with_another_number_of_workers(
    tmp_path: Path, stage: int, before: int, after: int
):
    expected = Side(Remembering, vectors).train()
    remember(tmp_path, 1, stage, before)
    actual = remember(tmp_path, 2, stage, after, scale=0.5)
    assert_same_weights(actual, expected)


class Validated(TrainerCallback):
    """The steps after which a validation within the epoch was."""

    def __init__(self) -> None:
        super().__init__("")
        self.steps: List[int] = []

    def on_validation(self, trainer: Any, *, batch_number: int, **kwargs: Any) -> None:
        self.steps.append(batch_number)


# One worker has ten steps in an epoch, and two have five.
@pytest.mark.parametrize("before, after, expected", [(1, 2, [4]), (2, 1, [])])
def test_what_was_validated_is_not_validated_again_by_another_number_of_workers(
    tmp_path: Path, before: int, after: int, expected: List[int]
) -> None:
    def train(world_size: int) -> List[int]:
        side = Side(
            Remembering,
            lambda rank: (3 * vectors(rank))[: 10 // world_size],
            2,
            world_size,
            num_epochs=1,
            validation_data_loader=Batches(vectors(0)),
            validate_every_num_batches=4,
            checkpointer=DeepSpeedCheckpointer(
                tmp_path, save_every_num_batches=4, keep_most_recent_by_count=None
            ),
            callbacks=lambda: [Validated()],
        )
        return side.on_all_ranks(
            lambda trainer: (trainer.train(), trainer.callbacks[0].steps)[1], tmp_path
        )[0]

    train(before)
    for checkpoint in tmp_path.glob("checkpoint_*"):
        if checkpoint.name != "checkpoint_e0_b4":
            shutil.rmtree(checkpoint)
    assert train(after) == expected


def twelve(size: Any) -> List[Dict[str, Any]]:
    """Twelve instances in batches of a size, or of several."""
    x = torch.rand(12, DIM, generator=torch.Generator().manual_seed(0))
    return [{"x": part} for part in x.split(size)]


def within_epoch(directory: Path, sizes: List[int], world_size: int = 1, **arguments: Any) -> Side:
    """A side with batches of the size for each rank."""
    return Side(
        TwoLayers,
        arguments.pop("batches", lambda rank: twelve(sizes[rank])),
        2,
        world_size,
        num_epochs=1,
        checkpointer=DeepSpeedCheckpointer(
            directory, save_completed_epochs=False, save_every_num_batches=3
        ),
        **arguments,
    )


# Batches of 3 are 4 steps, with a checkpoint after the third.
@pytest.mark.parametrize("before, after", [([3], [2]), ([3], [6]), ([3, 3], [3, 2])])
def test_batches_of_other_sizes_within_an_epoch_are_refused(
    tmp_path: Path, before: List[int], after: List[int], expect_message: Callable[[str], None]
):
    within_epoch(tmp_path, before, len(before)).train(tmp_path)
    side = within_epoch(tmp_path, after, len(after))
    (message,) = set(side.on_all_ranks(error_of_training, tmp_path))
    assert message.startswith("CheckpointError: ")
    expect_message(message)


@pytest.mark.parametrize(
    "after, arguments",
    [([3], {}), ([2, 2], {"world_size": 2}), ([2], {"num_gradient_accumulation_steps": 2})],
)
def test_batches_of_other_sizes_within_an_epoch_are_resumed_if_the_position_is_known(
    tmp_path: Path, after: List[int], arguments: Dict[str, Any]
):
    within_epoch(tmp_path, [3]).train(tmp_path)
    within_epoch(tmp_path, after, **arguments).train(tmp_path)


class Gathered(MultiProcessDataLoader):
    """Batches in an order that the random numbers of its process make."""

    def __init__(self, sizes: List[int]) -> None:
        arguments: Any = {"batch_size": 4, "num_workers": 1, "max_instances_in_memory": 6}
        super().__init__(DatasetReader(), "", **arguments)
        self.index_with(Vocabulary())
        self._sizes = sizes

    def _iter_batches(self) -> Any:
        return iter(twelve(self._sizes))


def test_batches_that_no_run_repeats_are_resumed(tmp_path: Path):
    for sizes in ([4, 4, 2, 2], [4, 2, 2, 4]):
        loader = Gathered(sizes)
        within_epoch(tmp_path, [], batches=lambda rank, loader=loader: loader).train(tmp_path)


class Rates(TrainerCallback):
    """The learning rate after each step."""

    def __init__(self) -> None:
        super().__init__("")
        self.rates: List[float] = []

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


SCHEDULES: Dict[str, Dict[str, Any]] = {
    "linear_with_warmup": {"warmup_steps": 0},
    "noam": {"model_size": 4, "warmup_steps": 6},
    "slanted_triangular": {"cut_frac": 0.2},
    "combined": {
        "schedulers": [
            [1, {"type": "polynomial_decay", "end_learning_rate": 0.2}],
            [3, {"type": "linear_with_warmup", "warmup_steps": 2}],
        ]
    },
}


# One worker has eight steps in an epoch, and two have four, of the same data.
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_another_number_of_workers(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    def rates(directory: Path, world_size: int) -> List[float]:
        directory.mkdir(exist_ok=True)
        side = WithSchedulers(
            Remembering,
            lambda rank: (2 * vectors(rank))[: 8 // world_size],
            2,
            world_size,
            num_epochs=4,
            checkpointer=DeepSpeedCheckpointer(
                directory, save_every_num_batches=2, keep_most_recent_by_count=None
            ),
            callbacks=lambda: [Rates()],
            schedulers={
                "learning_rate_scheduler": lambda optimizer: LearningRateScheduler.from_params(
                    Params({"type": name, **copy.deepcopy(SCHEDULES[name])}),
                    optimizer=optimizer,
                    num_epochs=4,
                    num_steps_per_epoch=8 // world_size,
                )
            },
        )
        return side.on_all_ranks(
            lambda trainer: (trainer.train(), trainer.callbacks[0].rates)[1], directory
        )[0]

    uninterrupted = rates(tmp_path, before)
    last = f"checkpoint_e2_b{4 // before}"
    for checkpoint in tmp_path.glob("checkpoint_*"):
        if checkpoint.name > last:
            shutil.rmtree(checkpoint)
    resumed = rates(tmp_path, after)
    # Half of the steps of two workers follow, or each rate twice, a step later.
    rest = uninterrupted[len(uninterrupted) * 5 // 8 :]
    if after == 2:
        assert resumed == pytest.approx(rest[1::2])
    else:
        before_rest = uninterrupted[len(uninterrupted) * 5 // 8 - 1]
        steps = [before_rest, *rest]
        assert resumed == pytest.approx([steps[(i + 1) // 2] for i in range(len(resumed))])


class Identity(Backbone):
    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"encoded": x}


class Regression(Head):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, 1)
        self.error = Average()

    def forward(self, encoded: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = (self.layer(encoded) - 1).pow(2).mean()
        self.error(loss.item())
        return {"loss": loss}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"error": float(self.error.get_metric(reset))}


def tasks(rank: int) -> List[Dict[str, Any]]:
    """The second task has no batches after the checkpoint in the middle of the epoch."""
    names = ("second", "second", "first", "first")
    return [{**batch, "task": [name] * 3} for batch, name in zip(vectors(rank), names)]


def test_heads_of_a_multitask_model_have_the_metrics_of_an_uninterrupted_epoch(tmp_path: Path):
    def errors(name: str) -> Dict[str, float]:
        heads = {"first": Regression, "second": Regression}
        side = Side(
            lambda: MultiTaskModel(Vocabulary(), Identity(), {k: v() for k, v in heads.items()}),
            tasks,
            2,
            num_epochs=1,
            validation_data_loader=Batches(tasks(0)),
            checkpointer=DeepSpeedCheckpointer(
                tmp_path / name, save_every_num_batches=1, keep_most_recent_by_count=None
            ),
        )
        (metrics,) = side.on_all_ranks(lambda trainer: trainer.train(), tmp_path / name)
        return {key: value for key, value in metrics.items() if key.endswith("_error")}

    expected = errors("uninterrupted")
    assert {"training_second_error", "validation_second_error"} < expected.keys()
    last = "checkpoint_e0_b2"
    shutil.copytree(tmp_path / "uninterrupted" / last, tmp_path / "resumed" / last)
    assert errors("resumed") == expected


def change_training_state(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Changes what is in the training state of rank 0, with a checksum that is right."""
    path = checkpoint / "training_state_w0.th"
    torch.save(change(torch.load(path, weights_only=False)), path)
    record = CommitRecord.read(str(checkpoint))
    record.files[path.name] = FileRecord.from_file(str(path))
    record.write(str(checkpoint))


@pytest.mark.parametrize(
    "changes",
    [
        {"progress": None},
        {"progress": {"epochs_completed": -1}},
        {"instances_per_step": 0},
        {"best_weights": {}},
        {"resume_state": []},
        None,
    ],
)
def test_a_training_state_of_something_else_is_refused(tmp_path: Path, changes: Any):
    train(tmp_path, num_epochs=1)
    checkpoint = tmp_path / "checkpoint_e1_b0"
    change_training_state(checkpoint, lambda s: [s] if changes is None else {**s, **changes})
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, num_epochs=2)
    assert all(name in str(error.value) for name in [str(checkpoint), *(changes or [])])


def test_a_training_state_of_another_version_is_refused(tmp_path: Path):
    train(tmp_path, num_epochs=1)
    checkpoint = tmp_path / "checkpoint_e1_b0"
    change_training_state(checkpoint, lambda state: {**state, "version": 2})
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, num_epochs=2)
    assert f"{checkpoint} has a training state of version 2" in str(error.value)
    assert "allennlp deepspeed export" in str(error.value)


def test_an_epoch_adds_little_to_the_training_state(tmp_path: Path):
    train(tmp_path, num_epochs=6)
    sizes: List[int] = [
        (tmp_path / f"checkpoint_e{epoch}_b0" / "training_state_w0.th").stat().st_size
        for epoch in range(1, 7)
    ]
    # The states of Python's, NumPy's and PyTorch's random numbers take 2.5, 2.5 and 5 kB.
    assert max(after - before for before, after in zip(sizes, sizes[1:])) <= 14_000


# files that are not of this package


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after the first of two epochs, which validated best."""
    directory = tmp_path_factory.mktemp("trained") / "out"
    train(directory, num_epochs=1, validation_metric="+loss")
    return directory


STATE_FILE = "state_w0.safetensors"


def replace_file(directory: Path, name: str, evidence: Path) -> Path:
    """Puts another file in the place of one of the checkpoint, and has its record agree."""
    checkpoint = directory / "checkpoint_e1_b0"
    path = checkpoint / name
    path.unlink()  # it may be a link to another
    torch.save(Malicious(evidence), path)
    record = CommitRecord.read(str(checkpoint))
    record.files[name] = FileRecord.from_file(str(path))
    record.write(str(checkpoint))
    return path


def recover(directory: Path) -> Any:
    return train(directory, num_epochs=2, validation_metric="+loss")


def read(directory: Path) -> Any:
    return StateFiles(str(directory / "checkpoint_e1_b0")).state_dict()


def export_(directory: Path) -> Any:
    # A trainer from Python writes none. It isn't needed for what is refused.
    (directory / "config.json").write_text('{"model": {"type": "of_somebody"}}')
    return export(str(directory), epoch=1)


@pytest.mark.parametrize(
    "command, name",
    [
        *((recover, name) for name in (STATE_FILE, "training_state_w0.th", "best.th")),
        *((read, name) for name in (STATE_FILE, "training_state_w0.th")),
        (export_, STATE_FILE),
    ],
)
def test_a_foreign_file_is_named_and_no_code_in_it_is_run(
    trained: Path, tmp_path: Path, command: Callable[[Path], Any], name: str
):
    directory, evidence = tmp_path / "out", tmp_path / "evidence"
    shutil.copytree(trained, directory)
    path = replace_file(directory, name, evidence)
    with pytest.raises(CheckpointError) as error:
        command(directory)
    text = "".join(traceback.format_exception(error.value))
    # Recovery gives the best weights their place in the serialization directory.
    assert f"{directory / name if name == 'best.th' else path} was not written by" in text
    assert "--recover" in text and "weights_only" not in text
    assert not evidence.exists()
