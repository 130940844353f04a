"""Validation batches for models whose metrics are those of the data of all ranks together."""

from typing import Any, Dict, Iterator, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import TrainingTraits
from allennlp_deepspeed.training.agreement import Agreement
from allennlp_deepspeed.training.even_batches import with_even_batches
from tests.support.workers import run_workers

Batch = Dict[str, Any]
EXCHANGE = Agreement(lambda: torch.device("cpu")).exchange


class Model:
    training_traits = TrainingTraits(validates_whole_set=True)

    def dummy_batch(self, batch: Batch) -> Batch:
        return {**batch, "counts": False}


class LazyLoader:
    """Has no length, as AllenNLP's with `max_instances_in_memory`."""

    def __init__(self, *values: int) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Batch]:
        return iter([{"value": value, "counts": True} for value in self._values])

    def __len__(self) -> int:
        raise TypeError


def batches_of(*values: int) -> List[Batch]:
    return list(with_even_batches(LazyLoader(*values), Model(), EXCHANGE))


def test_a_loader_without_length_is_read() -> None:
    assert [batch["value"] for batch in batches_of(1, 2)] == [1, 2]


def test_a_loader_without_batches_gives_none() -> None:
    assert batches_of() == []


def test_no_loader_stays_none() -> None:
    assert with_even_batches(None, Model(), EXCHANGE) is None
    model = Model()
    model.training_traits = TrainingTraits()
    loader = LazyLoader(1)
    assert with_even_batches(loader, model, EXCHANGE) is loader


def test_ranks_with_fewer_batches_go_on_with_what_does_not_count() -> None:
    def work(rank: int) -> Any:
        batches = batches_of(*range(3 - 2 * rank))
        try:
            batches_of(*range(1 - rank))
        except ConfigurationError as error:
            return [batch["counts"] for batch in batches], str(error)

    first, second = run_workers(2, work)
    assert first[0] == [True, True, True] and second[0] == [True, False, False]
    assert "A worker has no validation data" in first[1] and first[1] == second[1]


def test_what_does_not_count_is_the_batch_before_the_model_has_changed_it() -> None:
    def work(rank: int) -> List[int]:
        seen = []
        for batch in batches_of_tensors(range(3 - 2 * rank)):
            seen.append(int(batch["text"]["ids"]))
            batch["text"]["ids"] += 10
            del batch["text"]["ids"]
        return seen

    def batches_of_tensors(values: Any) -> Any:
        loader = [{"text": {"ids": torch.tensor(value)}} for value in values]
        return with_even_batches(loader, Model(), EXCHANGE)

    assert run_workers(2, work) == [[0, 1, 2], [0, 0, 0]]


class ModelOfFormerVersion:
    training_traits = TrainingTraits(validates_whole_set=True)

    def filler(self, batch: Batch) -> Batch:
        return batch


class SubclassOfFormerVersion(Model, ModelOfFormerVersion):
    pass


@pytest.mark.parametrize("model", [ModelOfFormerVersion(), SubclassOfFormerVersion()])
def test_the_former_name_of_dummy_batch_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="'dummy_batch'"):
        with_even_batches(LazyLoader(1), model, EXCHANGE)
