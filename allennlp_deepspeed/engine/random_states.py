"""
The states of all random number generators of a worker.
"""

import random
from typing import Any, Dict, List

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


def repeatable_random_states() -> Dict[str, Any]:
    """
    The states, for what will be computed a second time after `set_random_states`.

    Works around PyTorch 2.14.1: the dropout between the layers of an LSTM or a GRU has a random
    state of its own on a GPU, cuDNN's, which starts anew whenever the state of the GPU's generator
    is set, and then isn't where it was. Gone when an LSTM on a GPU gives the same again after
    `random_states` and `set_random_states`.

    # Returns

    `Dict[str, Any]`
        As `random_states` gives them.
    """
    states = random_states()
    if "cuda" in states:
        # It starts anew here, too, with a seed that it draws from the generator of the CPU.
        torch.cuda.set_rng_state(states["cuda"])
    return states


def dropout_between_layers(model: torch.nn.Module) -> List[str]:
    """
    # Parameters

    model : `torch.nn.Module`, required.

    # Returns

    `List[str]`
        The names of recurrent modules whose dropout on a GPU has the random state of
        `repeatable_random_states`, that no checkpoint can hold.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.RNNBase)
        and module.dropout > 0
        and module.num_layers > 1
        and any(parameter.is_cuda for parameter in module.parameters())
    ]


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
