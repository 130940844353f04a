"""The states of random number generators that checkpoints hold."""

import io
import random

import numpy as np
import pytest
import torch

from allennlp_deepspeed.engine.random_states import (
    RandomHistory,
    random_states,
    set_random_states,
)


def draw() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


def saved(history: RandomHistory) -> bytes:
    buffer = io.BytesIO()
    torch.save(history.state_dict(), buffer)
    return buffer.getvalue()


def test_a_history_brings_back_each_of_its_points():
    history, expected = RandomHistory(), []
    for _ in range(4):
        history.append(random_states())
        expected.append(draw())
    state_dict = torch.load(io.BytesIO(saved(history)), weights_only=True)
    loaded = RandomHistory.from_state_dict(state_dict, length=3)
    loaded.append(history[3])
    assert len(loaded) == 4
    for i in (2, 0, 3, 1):
        set_random_states(loaded[i])
        assert draw() == expected[i]
    assert saved(loaded) == saved(history)


@pytest.mark.parametrize(
    "use, max_bytes",
    [
        (lambda: None, 100),
        (lambda: random.shuffle(list(range(1000))), 2_700),
        (lambda: torch.rand(1000), 2_700),
        (
            lambda: [random.shuffle(list(range(1000))), np.random.rand(1000), torch.rand(1000)],
            7_700,
        ),
    ],
    ids=["none", "python", "torch", "all"],
)
def test_a_point_takes_what_the_generators_in_use_need(use, max_bytes: int):
    history = RandomHistory()
    sizes = []
    for _ in range(12):
        use()
        history.append(random_states())
        sizes.append(len(saved(history)))
    assert (sizes[-1] - sizes[1]) / 10 <= max_bytes
