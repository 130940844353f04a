import copy
from contextlib import contextmanager
from typing import Any, Iterator, List, Tuple

import torch

from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.engine.process.random_states import random_states, set_random_states


@contextmanager
def restored_state(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that restores metrics, buffers, attributes, random states, training modes and
    the `get_extra_state` of modules after forward passes.
    """
    random, modules = random_states(), list(model.modules())
    modes = [(module, module.training) for module in modules]
    buffers: List[Tuple[torch.nn.Module, str, Any, Any]] = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    user_states = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    try:
        with AttributeStates(model).restored():
            yield
    finally:
        for module in modules:
            for name in module._buffers.keys() - {n for m, n, *_ in buffers if m is module}:
                delattr(module, name)
        for module, name, buffer, value in buffers:
            # An expanded buffer can't be written to.
            if buffer is not None and not torch.equal(buffer, value):
                buffer.copy_(value)
            module._buffers[name] = buffer
        for module, extra_state in user_states:
            module.set_extra_state(extra_state)
        for module, is_training in modes:
            module.training = is_training
        set_random_states(random)
