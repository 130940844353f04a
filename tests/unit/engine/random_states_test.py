"""The states of random number generators that checkpoints hold."""

import io
import random

import numpy as np
import torch

from allennlp_deepspeed.checkpoint import serialization  # noqa: F401  # allows NumPy's arrays
from allennlp_deepspeed.engine.process.random_states import random_states, set_random_states


def draw() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


def test_saved_states_bring_back_what_is_drawn():
    buffer = io.BytesIO()
    torch.save(random_states(), buffer)
    expected = draw()
    buffer.seek(0)
    set_random_states(torch.load(buffer, weights_only=True))
    assert draw() == expected
