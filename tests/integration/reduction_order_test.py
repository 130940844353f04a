"""
Gradients are reduced in the same order on every rank, whatever the order in which they come.
"""

import copy
from functools import partial
from typing import Any, Callable, Dict, Iterable, List

import pytest
import torch
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DatasetReader, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.data.samplers import BucketBatchSampler
from allennlp.models import Model

from tests.support.experiment import StateDict, assert_same_weights, load_config
from tests.support.side_by_side import Batch, Side

WORLD_SIZE = 2


class Tagger:
    """A tagger with an LSTM, and its data in batches of sentences of about the same length."""

    def __init__(self) -> None:
        params = Params(load_config("tagger"))
        prepare_environment(params)
        reader = DatasetReader.from_params(params.pop("dataset_reader"))
        instances = list(reader.read(params.pop("train_data_path")))
        vocab = Vocabulary.from_instances(instances)
        self.model: Model = Model.from_params(params.pop("model"), vocab=vocab)
        self.batches: List[List[Batch]] = []
        for rank in range(WORLD_SIZE):
            sampler = BucketBatchSampler(batch_size=4, sorting_keys=["tokens"])
            loader = MultiProcessDataLoader(
                _Instances(instances[rank::WORLD_SIZE]), "", batch_sampler=sampler
            )
            loader.index_with(vocab)
            self.batches.append([{**batch, "metadata": None} for batch in loader])


class _Instances(DatasetReader):
    def __init__(self, instances: List[Any]) -> None:
        super().__init__()
        self._instances = instances

    def _read(self, file_path: str):
        return iter(self._instances)

    def apply_token_indexers(self, instance) -> None:
        pass


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    return Tagger()


SGD = partial(torch.optim.SGD, lr=0.3)


def sgd_with_groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.3)


OVERLAP = {"overlap_comm": True}
SMALL_BUCKETS = {"reduce_bucket_size": 300}


@pytest.mark.parametrize(
    "optimizer, stage, zero, steps, mode",
    [
        pytest.param(SGD, 1, OVERLAP, 1, "auto", id="overlap at 1"),
        pytest.param(SGD, 2, {}, 1, "auto", id="2"),
        pytest.param(
            sgd_with_groups, 2, {"reduce_scatter": False}, 1, "auto", id="all-reduce at 2"
        ),
        pytest.param(SGD, 2, OVERLAP, 2, "micro_batch", id="micro-batch at 2"),
        pytest.param(SGD, 3, SMALL_BUCKETS, 1, "auto", id="small buckets at 3"),
    ],
)
def test_sentences_of_equal_length_on_one_worker_only(
    tagger: Tagger, optimizer: Any, stage: int, zero: Dict[str, Any], steps: int, mode: str
) -> None:
    actual = side(
        tagger.model,
        tagger.batches,
        optimizer,
        {"stage": stage, **zero},
        num_gradient_accumulation_steps=steps,
        gradient_synchronization=mode,
    ).train()
    assert_same_weights(actual, in_one_process(tagger.model, tagger.batches, optimizer, steps))


def side(
    model: Model,
    batches: List[List[Batch]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    zero: Dict[str, Any],
    **arguments: Any,
) -> Side:
    """For one epoch of a copy of the model."""
    return Side(
        lambda: copy.deepcopy(model),
        lambda rank: batches[rank],
        zero["stage"],
        WORLD_SIZE,
        zero=zero,
        optimizer=optimizer,
        num_epochs=1,
        **arguments,
    )


def in_one_process(
    model: Model, batches: List[List[Batch]], optimizer: Any, steps: int = 1
) -> StateDict:
    """With AllenNLP's trainer, which has the batches of all workers in each step."""
    together = [batch for of_step in zip(*batches, strict=True) for batch in of_step]
    return Side(
        lambda: copy.deepcopy(model),
        lambda rank: together,
        optimizer=optimizer,
        num_epochs=1,
        num_gradient_accumulation_steps=WORLD_SIZE * steps,
    ).train()


class CompiledClassifier(Model):
    """Goes through the layers of a part that is compiled in the one order or the other."""

    is_compiled = True

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.part = _Part()
        self.last = torch.nn.Linear(6, 1)

    def forward(self, inputs, is_turned) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        part = torch.compile(self.part, backend="aot_eager") if self.is_compiled else self.part
        return {"loss": self.last(part(inputs, is_turned)).pow(2).mean()}


class _Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, is_turned: bool) -> torch.Tensor:
        layers = (self.other, self.one) if is_turned else (self.one, self.other)
        for layer in layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_part_whose_gradients_come_in_another_order(stage: int) -> None:
    torch.manual_seed(1)
    # At stage 3 workers have to go through the modules themselves in one order.
    is_turned = [
        [stage < 3 and (rank + i) % 2 == 0 for i in range(4)] for rank in range(WORLD_SIZE)
    ]
    batches: List[List[Batch]] = [
        [{"inputs": torch.randn(4, 6), "is_turned": is_turned} for is_turned in of_worker]
        for of_worker in is_turned
    ]
    model = CompiledClassifier()
    actual = side(model, batches, SGD, {"stage": stage}).train()
    model.is_compiled = False
    assert_same_weights(actual, in_one_process(model, batches, SGD))
