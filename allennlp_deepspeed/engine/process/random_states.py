"""States of all random number generators of a worker."""

import random
from typing import Any, Dict, List

import numpy as np
import torch


def random_states() -> Dict[str, Any]:
    """
    Returns the states of the generators of Python, NumPy and PyTorch, on the CPU and on its GPU.
    """
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
    Returns the states, for a computation that will be repeated after `set_random_states`.

    Works around PyTorch 2.14.1: on a GPU, dropout between the layers of an LSTM or GRU has its own
    random state in cuDNN. Setting the state of the GPU's generator resets this state instead of
    restoring it. Gone when an LSTM on a GPU returns the same outputs after `random_states` and
    `set_random_states`.

    # Returns

    `Dict[str, Any]`
        The same as `random_states`.
    """
    states = random_states()
    if "cuda" in states:
        # This resets it here, too, with a seed that it draws from the generator of the CPU.
        torch.cuda.set_rng_state(states["cuda"])
    return states


def find_unrestorable_dropout(model: torch.nn.Module) -> List[str]:
    """
    Finds recurrent modules whose dropout on a GPU isn't restored from a checkpoint.

    # Parameters

    model : `torch.nn.Module`, required.

    # Returns

    `List[str]`
        Their names. Their random state is the one described in `repeatable_random_states`, which
        can't be saved.
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
    Restores the states of the generators.

    # Parameters

    states : `Dict[str, Any]`, required.
        The result of `random_states`.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
