"""Which batches an epoch has, on one worker and on several."""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type

import pytest
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data import Instance, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader, MultiTaskDataLoader, SimpleDataLoader
from allennlp.data.data_loaders.multitask_epoch_sampler import UniformSampler
from allennlp.data.data_loaders.multitask_scheduler import RoundRobinScheduler
from allennlp.data.dataset_readers import DatasetReader, MultiTaskDatasetReader
from allennlp.data.fields import MetadataField
from allennlp.data.samplers import BatchSampler, BucketBatchSampler
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.training.agreement import Agreement
from allennlp_deepspeed.training.batch_groups import BatchGroups
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side, error_of_training
from tests.support.workers import run_workers

EXCHANGE = Agreement(lambda: torch.device("cpu")).exchange
NUM_EPOCHS = 3


class Numbers(DatasetReader):
    """As many numbers as the path says, on each rank."""

    def __init__(self) -> None:
        super().__init__(manual_distributed_sharding=True)

    def _read(self, file_path: str):
        for number in range(int(file_path)):
            yield Instance({"number": MetadataField(number)})


def numbers(
    num_instances: int,
    loader_class: Type[MultiProcessDataLoader] = MultiProcessDataLoader,
    **arguments: Any,
) -> MultiProcessDataLoader:
    if "batch_sampler" not in arguments:
        arguments["batch_size"] = 2
    loader = loader_class(Numbers(), str(num_instances), **arguments)
    loader.index_with(Vocabulary())
    return loader


def seen(epochs: List[List[Dict[str, Any]]]) -> List[List[int]]:
    return [[number for batch in epoch for number in batch["number"]] for epoch in epochs]


def seen_by_groups(loader: Any, group_size: int) -> List[List[int]]:
    return seen(
        [
            [
                batch
                for group in BatchGroups(loader, group_size, EXCHANGE)
                for batch in group.micro_batches
            ]
            for _ in range(NUM_EPOCHS)
        ]
    )


@pytest.mark.parametrize("group_size, num_workers", [(1, 1), (3, 2)])
def test_batches_per_epoch_go_on_where_the_last_epoch_ended(group_size: int, num_workers: int):
    def work(rank: int) -> List[List[List[int]]]:
        return [
            seen_by_groups(numbers(20, batches_per_epoch=4), group_size),
            seen_by_groups(numbers(20 - 4 * rank, batches_per_epoch=4), group_size),
        ]

    # 24 of them, as AllenNLP's trainer takes them.
    of_20, of_16 = (
        seen([list(loader) for _ in range(NUM_EPOCHS)])
        for loader in (numbers(20, batches_per_epoch=4), numbers(16, batches_per_epoch=4))
    )
    assert len({number for epoch in of_20 for number in epoch}) == 20
    expected = [[of_20, of_20], [of_20, of_16]][:num_workers]
    assert run_workers(num_workers, work) == expected


def test_the_expected_length_is_that_of_the_epoch():
    def work(rank: int) -> Any:
        groups = BatchGroups(numbers(20 - 4 * rank), 3, EXCHANGE)
        return groups.expected_length, len(list(groups))

    assert run_workers(2, work) == [(3, 3), (3, 3)]


class Parabola(Model):
    """Fits a line to it."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.line = torch.nn.Linear(1, 1)

    def forward(self, number: List[int], **task: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        x = torch.tensor(number).unsqueeze(1) / 20
        return {"loss": (self.line(x) - x.pow(2)).pow(2).mean()}


@pytest.fixture(scope="module")
def line() -> Dict[str, torch.Tensor]:
    return line_after_batches_per_epoch(stage=None)


def line_after_batches_per_epoch(stage: Optional[int]) -> Dict[str, torch.Tensor]:
    def batches_of(rank: int) -> MultiProcessDataLoader:
        return numbers(20 - 4 * rank, batches_per_epoch=4)

    return Side(Parabola, batches_of, stage, world_size=2, num_epochs=NUM_EPOCHS).train()


@pytest.mark.parametrize("stage", range(4))
def test_batches_per_epoch_train_as_with_gradient_descent(
    line: Dict[str, torch.Tensor], stage: int
):
    assert_same_weights(line_after_batches_per_epoch(stage), line)


def test_epochs_whose_length_is_unknown_train_as_with_gradient_descent():
    def batches_of(rank: int) -> MultiProcessDataLoader:
        return numbers(20 - 4 * rank, max_instances_in_memory=4)

    def line_after(stage: Optional[int]) -> Dict[str, torch.Tensor]:
        settings = {"num_gradient_accumulation_steps": 3, "grad_norm": 0.1}
        return Side(Parabola, batches_of, stage, world_size=2, **settings).train()

    assert_same_weights(line_after(stage=2), line_after(stage=None))


@pytest.mark.parametrize("group_size, is_length_known", [(2, True), (3, False)])
def test_an_epoch_ends_everywhere_with_the_shortest(group_size: int, is_length_known: bool):
    def work(rank: int) -> List[List[int]]:
        memory = {} if is_length_known else {"max_instances_in_memory": 4}
        return seen_by_groups(numbers(12 + 6 * rank, **memory), group_size)

    assert run_workers(2, work) == [[list(range(12))] * NUM_EPOCHS] * 2


class Remembering(SimpleDataLoader):
    """Keeps its place when an epoch has been read to its end, and starts the next one there."""

    def __init__(self, num_instances: int) -> None:
        super().__init__(list(Numbers().read(str(num_instances))), batch_size=2)
        self.num_epochs_read = 0

    def __iter__(self):
        yield from super().__iter__()
        self.num_epochs_read += 1


def test_each_rank_reads_its_epoch_to_the_end():
    def work(rank: int) -> int:
        loader = Remembering(8 + 4 * rank)
        seen_by_groups(loader, group_size=2)
        dist.barrier()
        return loader.num_epochs_read

    assert run_workers(2, work) == [NUM_EPOCHS, NUM_EPOCHS]


@pytest.mark.parametrize("arguments", [{}, {"max_instances_in_memory": 2}], ids=["known", "lazy"])
def test_a_worker_without_data_is_an_error_on_all(arguments: Dict[str, Any]):
    def read(rank: int) -> str:
        with pytest.raises(ConfigurationError) as error:
            list(BatchGroups(numbers(4 - 4 * rank, **arguments), 3, EXCHANGE))
        return str(error.value)

    for message in run_workers(2, read):
        assert message.startswith("A worker has no batch of training data")


class Estimated(SimpleDataLoader):
    """Has other numbers of batches than its length says."""

    def __init__(self, num_instances: int, estimate: int) -> None:
        super().__init__(list(Numbers().read(str(num_instances))), batch_size=2)
        self._estimate = estimate

    def __len__(self) -> int:
        return self._estimate


class Pairs(BatchSampler):
    """Pairs of instances and a short batch at the end, and an estimate of their number."""

    def __init__(self, estimate: int) -> None:
        self._estimate = estimate

    def get_batch_indices(self, instances: Sequence[Instance]) -> Iterator[List[int]]:
        indices = list(range(len(instances)))
        return (indices[i : i + 2] for i in range(0, len(indices), 2))

    def get_num_batches(self, instances: Sequence[Instance]) -> int:
        return self._estimate

    def get_batch_size(self) -> int:
        return 2


class PairsInBuckets(BucketBatchSampler):
    """Inherits the number of batches of other sizes."""

    get_batch_indices = Pairs.get_batch_indices


class ShortLast(MultiProcessDataLoader):
    """Inherits the number of all batches but a short one."""

    def _iter_batches(self):
        return numbers(len(self._instances))._iter_batches()


ESTIMATES: Dict[str, Callable[[int], Any]] = {
    "a loader's, too few": lambda n: Estimated(n, 1),
    "a loader's, too many": lambda n: Estimated(n, 9),
    "a sampler's, too few": lambda n: numbers(n, batch_sampler=Pairs(n // 2)),
    "a sampler's, none": lambda n: numbers(n, batch_sampler=Pairs(0)),
    "a sampler's, too many": lambda n: numbers(n, batch_sampler=Pairs(9)),
    "an inherited one of a sampler": lambda n: numbers(n, batch_sampler=PairsInBuckets(4)),
    "an inherited one of a loader": lambda n: numbers(n, ShortLast, drop_last=True),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimated_length_does_not_say_where_an_epoch_ends(name: str):
    def work(rank: int) -> List[List[List[int]]]:
        # The same number on both, and 3 batches beside 4.
        return [
            seen_by_groups(ESTIMATES[name](num_instances), group_size)
            for group_size in (1, 2)
            for num_instances in (7, 6 + 2 * rank)
        ]

    expected = [[list(range(number))] * NUM_EPOCHS for number in (7, 6, 7, 6)]
    assert run_workers(2, work) == [expected] * 2


@pytest.mark.parametrize("estimate", [3, 9])
def test_an_estimated_length_trains_as_with_gradient_descent(estimate: int):
    """Of 4 batches, the last of which is short and ends a group of 3."""

    def line_after(stage: Optional[int], num_workers: int) -> Dict[str, torch.Tensor]:
        return Side(
            Parabola,
            lambda rank: numbers(7, batch_sampler=Pairs(estimate)),
            stage,
            world_size=num_workers,
            num_gradient_accumulation_steps=3,
            validation_data_loader=numbers(7, batch_sampler=Pairs(estimate)),
        ).train()

    # The workers have the same data.
    expected = line_after(None, 1)
    assert_same_weights(line_after(None, 2), expected)
    for num_workers in (1, 2):
        assert_same_weights(line_after(2, num_workers), expected)


def multitask(rank: int) -> MultiTaskDataLoader:
    """Its length counts the instances of an epoch once for each task."""
    loader = MultiTaskDataLoader(
        MultiTaskDatasetReader({"a": Numbers(), "b": Numbers()}),
        {"a": "14", "b": str(10 + rank)},
        RoundRobinScheduler(batch_size=2),
        sampler=UniformSampler(),
        instances_per_epoch=12,
        shuffle=False,
    )
    loader.index_with(Vocabulary())
    return loader


def test_several_tasks_train_as_with_gradient_descent():
    actual, expected = (
        Side(Parabola, multitask, stage, world_size=2, num_epochs=NUM_EPOCHS).train()
        for stage in (3, None)
    )
    assert_same_weights(actual, expected)


@pytest.mark.parametrize("arguments", [{}, {"max_instances_in_memory": 2}], ids=["known", "lazy"])
def test_an_epoch_without_data_is_an_error_in_one_process(arguments: Dict[str, Any]):
    def read(rank: int) -> str:
        with pytest.raises(ConfigurationError) as error:
            list(BatchGroups(numbers(0, **arguments), 3, EXCHANGE))
        return str(error.value)

    (message,) = run_workers(1, read)
    assert "no batch of training data" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_validation_without_data_is_an_error(world_size: int):
    # Of data that are read lazily, nobody knows the number before.
    side = Side(
        Parabola,
        lambda rank: numbers(4),
        stage=2,
        world_size=world_size,
        validation_data_loader=numbers(0, max_instances_in_memory=2),
    )
    for message in side.on_all_ranks(error_of_training):
        assert message.startswith("ConfigurationError: There was no validation batch")


# PyTorch's loaders


class OfPyTorch(torch.utils.data.DataLoader):
    """With the one method that AllenNLP's trainer calls."""

    def set_target_device(self, device: torch.device) -> None:
        pass


def of_pytorch(rank: int, num: int = 10, **arguments: Any) -> OfPyTorch:
    arguments = {"batch_size": 3, "shuffle": True, **arguments}
    return OfPyTorch(list(range(num + 2 * rank)), collate_fn=collate, **arguments)  # type: ignore[arg-type]


def collate(numbers: List[int]) -> Dict[str, Any]:
    return {"number": numbers}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(range(9 + 3 * self.rank))


LOADERS: Dict[str, Any] = {
    "shuffled": of_pytorch,
    "in a worker": lambda rank: of_pytorch(rank, num_workers=1),
    "a sampler's batches": lambda rank: of_pytorch(
        rank, batch_sampler=[[0, 1], [2], [3, 4, 5]], batch_size=1, shuffle=False
    ),
    "a stream": lambda rank: OfPyTorch(Stream(rank), batch_size=3, collate_fn=collate),
}


@pytest.mark.parametrize("name, world_size", [*((name, 1) for name in LOADERS), ("shuffled", 2)])
def test_loaders_of_pytorch_train_as_with_gradient_descent(name: str, world_size: int) -> None:
    arguments: Any = {
        "world_size": world_size,
        "num_gradient_accumulation_steps": 2,
        "validation_data_loader": of_pytorch(0, shuffle=False),
    }
    expected = Side(Parabola, LOADERS[name], **arguments).train()
    assert_same_weights(Side(Parabola, LOADERS[name], 2, **arguments).train(), expected)


@pytest.mark.parametrize("has_generator", [False, True])
def test_a_loader_of_pytorch_is_at_its_place_after_recovery(
    tmp_path: Path, has_generator: bool
) -> None:
    def train(directory: Path, num_epochs: int) -> Dict[str, torch.Tensor]:
        def loader(rank: int) -> OfPyTorch:
            generator = torch.Generator().manual_seed(5) if has_generator else None
            return of_pytorch(rank, generator=generator)

        checkpointer = DeepSpeedCheckpointer(directory)
        side = Side(Parabola, loader, 2, num_epochs=num_epochs, checkpointer=checkpointer)
        return side.train(directory)

    expected = train(tmp_path / "uninterrupted", 3)
    train(tmp_path / "recovered", 1)
    assert_same_weights(train(tmp_path / "recovered", 3), expected, tolerance=0)
