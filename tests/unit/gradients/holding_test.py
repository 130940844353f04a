"""Which gradients are held until the last micro-batch."""

from typing import List

import pytest
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.gradients import gradient_memory
from allennlp_deepspeed.gradients.holding import Holding

# In the order in which they are reduced: the last layer first.
NAMES = ["head.bias", "head.weight", "encoder.weight", "embedding.weight"]
SIZES = [2, 8, 30, 60]


def held(setting) -> List[str]:
    each = Holding(setting, NAMES, SIZES, num_micro_batches=4).each
    return [name for name, is_held in zip(NAMES, each) if is_held]


def test_a_share_is_held_of_what_comes_last_in_a_backward_pass() -> None:
    assert [held(share) for share in (0, 0.05, 0.3, 0.5, 0.62, 0.9, 1)] == [
        [],
        ["head.bias"],
        NAMES[2:3],
        NAMES[:3],
        ["head.bias", "embedding.weight"],
        NAMES[2:],
        NAMES,
    ]


def test_names_are_found_as_elsewhere() -> None:
    assert held(["head", "^encoder"]) == NAMES[:3]
    assert (held("boundary"), held("micro_batch")) == (NAMES, [])
    with pytest.raises(ConfigurationError, match='"decoder", which is found in no name.*head.bias'):
        held(["head", "decoder"])


def test_what_fits_into_half_of_the_free_memory_is_held_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for free, expected in [(-5, []), (4 * 2 * 40, NAMES[:3]), (10**6, NAMES)]:
        monkeypatch.setattr(gradient_memory, "least_left_free", lambda device, free=free: free)
        holding = Holding("auto", NAMES, SIZES, num_micro_batches=4)
        assert not holding.is_known and not any(holding.each) and holding.state_dict() is None
        holding.find(torch.float32)
        assert [name for name, is_held in zip(NAMES, holding.each) if is_held] == expected
        monkeypatch.setattr(gradient_memory, "least_left_free", lambda device: 0)
        for others, num_micro_batches in ((holding.each, 4), ([False] * 4, 3)):
            continued = Holding("auto", NAMES, SIZES, num_micro_batches)
            continued.load_state_dict(holding.state_dict())
            assert continued.each == others
            assert continued.is_known == (num_micro_batches == 4)
            assert continued.left_free == (holding.left_free if num_micro_batches == 4 else 0)


def test_what_version_0_1_0_has_saved_is_found_anew() -> None:
    holding = Holding("auto", NAMES, SIZES, num_micro_batches=4)
    holding.load_state_dict({"mode": "boundary", "where": [2, 4]})
    assert not holding.is_known
