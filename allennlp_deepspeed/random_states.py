"""
The states of all random number generators of a worker.
"""

import random
from typing import Any, Dict

import numpy as np
import torch


def random_states() -> Dict[str, Any]:
    """The states of the generators of Python, NumPy and PyTorch, on the CPU and on its GPU."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Dict[str, Any]) -> None:
    """
    # Parameters

    states : `Dict[str, Any]`, required.
        As `random_states` gave them.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
