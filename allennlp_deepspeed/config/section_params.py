"""
What `params` of the sections "optimizer" and "scheduler" can be, of which DeepSpeed's schema says
nothing: they are the arguments of a class.
"""

import inspect
import logging
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import lr_schedules

from allennlp_deepspeed.config.schema import did_you_mean
from allennlp_deepspeed.config.values import is_number, unquoted

_AUTO = "auto"

# Beside the arguments of its classes, what DeepSpeed's engine takes out itself.
_OF_ENGINE = ("torch_adam", "adam_w_mode", "adamw_mode", "fp32_optimizer_states", "foreach")

_CLASSES: Dict[str, List[Callable]] = {
    "adam": [FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW],
    "adamw": [FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW],
    "lion": [FusedLion, DeepSpeedCPULion],
    "lamb": [FusedLamb],
    "adagrad": [torch.optim.Adagrad],
}

_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "max_coeff", "min_coeff", "lr_decay")


def optimizer_problems(name: str, params: Dict[str, Any]) -> Iterator[str]:
    """
    # Parameters

    name : `str`, required.
        The section's "type", one that there is.
    params : `Dict[str, Any]`, required.

    # Returns

    `Iterator[str]`
        A line for each of the params that the optimizer can't have, which starts with its name.
    """
    params = {key: value for key, value in params.items() if value != _AUTO}
    known = _known_of(name)
    for key, value in params.items():
        if known is not None and key not in known:
            yield f"{key} is no parameter of {name}: {did_you_mean(key, sorted(known))}"
        elif key in _NUMBERS and not is_number(value):
            yield f"{key} is {value!r}: must be a number{unquoted(value)}"
        elif key == "betas" and not (
            isinstance(value, list) and len(value) == 2 and all(map(is_number, value))
        ):
            yield f"betas is {value!r}: must be two numbers, such as [0.9, 0.999]"


def _known_of(name: str) -> Optional[List[str]]:
    """`None` if it isn't known."""
    classes = _CLASSES.get(name.lower(), [])
    # DeepSpeed's own names come first: its Muon isn't torch's.
    if name.lower() not in ds_config.DEEPSPEED_OPTIMIZERS and hasattr(torch.optim, name):
        classes = [getattr(torch.optim, name)]
    if not classes:
        return None
    names = [key for each in classes for key in inspect.signature(each).parameters]
    return [key for key in {*names, *_OF_ENGINE} if key not in ("params", "model_params")]


@contextmanager
def in_silence() -> Iterator[None]:
    """A context in which nothing is logged, for what is constructed only to try."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def scheduler_problem(name: str, params: Dict[str, Any]) -> Optional[str]:
    """
    # Parameters

    name : `str`, required.
        The section's "type", one that there is.
    params : `Dict[str, Any]`, required.
        With nothing left to fill in.

    # Returns

    `Optional[str]`
        What the schedule itself says of its params, if it can't be constructed of them.
    """
    scheduler = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    parameters = inspect.signature(scheduler).parameters
    for key, value in params.items():
        if (
            isinstance(value, str)
            and unquoted(value)
            and not isinstance(parameters[key].default, str)
        ):
            return f"{key} is {value!r}: must be a number{unquoted(value)}"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    try:
        # Some of the params stand for what is known once the data are read.
        with in_silence():
            scheduler(optimizer, **params).step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
