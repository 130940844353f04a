"""Where parameters' elements are, as far as it takes no engine: those of all stages need one."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from allennlp_deepspeed.engine.shards import Fragment, Shards, own_partition, whole_shape


def stage_0(model: nn.Module, basic_optimizer: torch.optim.Optimizer, **attributes: Any) -> Any:
    """An engine, as far as `Shards` ask it, with what DeepSpeed's optimizer has of its own."""
    is_plain = not attributes
    return SimpleNamespace(
        module=model,
        basic_optimizer=basic_optimizer,
        optimizer=basic_optimizer if is_plain else SimpleNamespace(**attributes),
        zero_optimization_partition_weights=lambda: False,
    )


def test_a_fragment_is_found_in_the_shard_and_in_the_whole():
    shard, whole = torch.arange(10.0), torch.arange(20.0).view(4, 5)
    fragment = Fragment(shard, start=2, offset=7, size=3)
    assert fragment.in_master(shard).tolist() == [2, 3, 4]
    assert fragment.in_whole(whole).tolist() == [7, 8, 9]
    fragment.in_master(shard).copy_(fragment.in_whole(whole))  # in place
    assert shard.tolist() == [0, 1, 7, 8, 9, 5, 6, 7, 8, 9]


def test_an_optimizer_steps_the_parameters_themselves():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.bias]}, {"params": [model.weight]}]
    shards = Shards(stage_0(model, torch.optim.SGD(groups, lr=1)))
    assert shards.steps_parameters and not shards.is_sharded
    assert shards.names_of_groups == [["bias"], ["weight"]]
    assert [id(master) for master in shards.masters] == [id(model.bias), id(model.weight)]
    assert shards.fragments[model.weight] == Fragment(model.weight, 0, 0, 6)


def test_flat_copies_have_the_parameters_one_after_another():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    flat = nn.Parameter(torch.arange(8.0))
    parameters = [model.bias, model.weight]
    engine = stage_0(model, torch.optim.SGD([flat], lr=1), fp16_groups=[parameters])
    shards = Shards(engine)
    assert not shards.steps_parameters
    assert shards.names_of_groups == [["bias", "weight"]]
    assert shards.parameters_of_masters == [parameters]
    assert shards.fragments[model.weight] == Fragment(flat, 2, 0, 6)
    shards.update_parameters()
    assert model.bias.tolist() == [0, 1]
    assert model.weight.tolist() == [[2, 3, 4], [5, 6, 7]]
    alike = shards.gather_alike(model.weight, {flat: torch.arange(8.0) * 2})
    assert alike.tolist() == [[4, 6, 8], [10, 12, 14]]


def test_a_whole_parameter_is_a_ranks_own():
    weight = nn.Linear(3, 2).weight
    assert own_partition(weight) == Fragment(weight, 0, 0, 6)
    assert whole_shape(weight) == (2, 3)
