"""Where parameters' elements are, at each ZeRO stage and in each of DeepSpeed's optimizers."""

import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from torch import nn

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine import weights
from allennlp_deepspeed.engine.shards import Shards, own_partition, whole_shape
from allennlp_deepspeed.engine.wrapped_model import process_environment
from tests.support.side_by_side import CPU, Side
from tests.support.workers import run_workers

WORLD_SIZE = 2
BF16 = {"bf16": {"enabled": True}}

CASES: Dict[str, Dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 0 in bf16": {"stage": 0, "deepspeed_config": BF16},
    "stage 1 in bf16 with fp32 gradients": {
        "stage": 1,
        "deepspeed_config": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "stage 2 with offload": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "stage 3": {"stage": 3},
    "stage 3 in sub-groups": {"stage": 3, "zero": {"sub_group_size": 4}},
}

# Of the optimizer; another order than that of the model.
GROUPS = [["second.weight", "second.bias"], ["scale", "first.weight"]]
SHAPES = {
    "first.weight": (3, 5),
    "second.weight": (7, 3),
    "second.bias": (7,),
    "scale": (1,),
    "frozen.weight": (3, 3),
}


class Layers(Model):
    """Has parameters whose numbers of elements two ranks can't share equally."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.first = nn.Linear(5, 3, bias=False)
        self.second = nn.Linear(3, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.second(self.frozen(self.first(x))) * self.scale).pow(2).mean()}


def _batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(2, 5)}]


def _layers() -> Layers:
    model = Layers(Vocabulary())
    with torch.no_grad():
        for parameter in model.parameters():
            # Each element once, and as precise as bf16 is.
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return model


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    scale, first, second_weight, second_bias = (p for p in parameters if p.requires_grad)
    return torch.optim.SGD(
        [{"params": [second_weight, second_bias]}, {"params": [scale, first], "lr": 0.1}], lr=0.2
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


def _facts(trainer: Any) -> Dict[str, Any]:
    """What this rank's `Shards` say. To be called by every rank."""
    engine = trainer.engine
    shards = Shards(engine)
    named = {name: parameter for parameter, name in shards.names.items()}
    partition = own_partition(named["frozen.weight"])
    facts = {
        "groups": shards.names_of_groups,
        "masters": [master.numel() for master in shards.masters],
        "parameters_of_masters": [
            [shards.names[p] for p in parameters] for parameters in shards.parameters_of_masters
        ],
        "fragments": {
            shards.names[p]: (f.offset, _array(f.in_master(f.master)), f.padding)
            for p, f in shards.fragments.items()
        },
        "frozen": (partition.offset, _array(partition.in_master(partition.master))),
        "shapes": {name: tuple(whole_shape(parameter)) for name, parameter in named.items()},
        "is_sharded": shards.is_sharded,
        "steps_parameters": shards.steps_parameters,
    }
    with shards.in_param_groups():
        groups = engine.basic_optimizer.param_groups
        facts["in_param_groups"] = [tensor.numel() for g in groups for tensor in g["params"]]
    for i in range(len(shards.masters)):
        with shards.in_memory(i) as master:
            master.data.add_(1)
    shards.update_parameters()
    full = {name: weights.full_parameter(p, shards) for name, p in named.items()}
    facts["updated"] = {name: _array(parameter) for name, parameter in full.items()}
    return facts


def _facts_of_cases(rank: int) -> Dict[str, Any]:
    """By case, one engine after another."""
    facts = {}
    with process_environment(CPU, rank), tempfile.TemporaryDirectory() as directory:
        for case, arguments in CASES.items():
            side = Side(_layers, _batches, world_size=WORLD_SIZE, **arguments)
            side.optimizer = _optimizer
            trainer = side.construct(rank, Path(directory))
            assert isinstance(trainer, DeepSpeedTrainer)
            with trainer.session():
                facts[case] = {**_facts(trainer), "case": case}
    return facts


@pytest.fixture(scope="module")
def facts_of_ranks() -> List[Dict[str, Any]]:
    return run_workers(WORLD_SIZE, _facts_of_cases)


@pytest.fixture(params=CASES)
def on_each_rank(facts_of_ranks: Any, request: pytest.FixtureRequest) -> List[Dict[str, Any]]:
    return [facts[request.param] for facts in facts_of_ranks]


def _whole(name: str) -> np.ndarray:
    return np.arange(np.prod(SHAPES[name]), dtype=np.float32).reshape(SHAPES[name])


def test_the_groups_are_the_optimizers(on_each_rank: List[Dict[str, Any]]):
    for facts in on_each_rank:
        assert facts["groups"] == GROUPS
        assert facts["shapes"] == SHAPES


def test_each_element_is_on_one_rank_or_on_all(on_each_rank: List[Dict[str, Any]]):
    for name in sum(GROUPS, []):
        fragments = [f["fragments"][name] for f in on_each_rank if name in f["fragments"]]
        for offset, elements, _ in fragments:
            np.testing.assert_array_equal(
                elements, _whole(name).flatten()[offset : offset + len(elements)]
            )
        found = sorted(np.concatenate([elements for _, elements, _ in fragments]))
        times = 1 if on_each_rank[0]["is_sharded"] else WORLD_SIZE
        assert found == sorted([*_whole(name).flatten()] * times)


def test_masters_hold_the_fragments_of_their_parameters(on_each_rank: List[Dict[str, Any]]):
    for facts in on_each_rank:
        held = facts["parameters_of_masters"]
        # Of stages 1 and 2, the last rank's may end in padding of its own.
        for length, names in zip(facts["masters"], held, strict=True):
            fragments = [facts["fragments"][name] for name in names if name in facts["fragments"]]
            needed = sum(len(elements) + padding for _, elements, padding in fragments)
            assert needed <= length <= needed + (1 if "stage 3" not in facts["case"] else 0)
        assert facts["in_param_groups"] == facts["masters"]
        assert sorted(sum(held, [])) == sorted(sum(GROUPS, []))


def test_masters_are_groups_or_parts_of_them(on_each_rank: List[Dict[str, Any]]):
    facts = on_each_rank[0]
    # SGD steps the copies of stage 0 one by one too.
    is_divided = "stage 0" in facts["case"] or facts["case"] == "stage 3 in sub-groups"
    assert (len(facts["masters"]) > len(GROUPS)) == is_divided


def test_the_model_follows_its_masters(on_each_rank: List[Dict[str, Any]]):
    for facts in on_each_rank:
        assert facts["steps_parameters"] == (facts["case"] == "stage 0")
        for name, updated in facts["updated"].items():
            change = 0 if name == "frozen.weight" else 1
            np.testing.assert_array_equal(updated, _whole(name) + change)


def test_a_frozen_parameter_is_partitioned_with_the_model(on_each_rank: List[Dict[str, Any]]):
    is_partitioned = "stage 3" in on_each_rank[0]["case"]
    parts = [facts["frozen"] for facts in on_each_rank]
    whole = _whole("frozen.weight").flatten()
    assert [len(elements) for _, elements in parts] == ([5, 4] if is_partitioned else [9, 9])
    for offset, elements in parts:
        np.testing.assert_array_equal(elements, whole[offset : offset + len(elements)])
