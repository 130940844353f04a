"""
Which section of the config was being constructed when something failed.
"""

import traceback
from types import FrameType
from typing import Any, Iterator, List, Optional, Tuple

from allennlp.common import Lazy
from allennlp.common.checks import ConfigurationError
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.nn.parallel import DdpAccelerator

# What AllenNLP's train command constructs itself.
_OF_THE_COMMAND = {
    DatasetReader: "dataset_reader",
    DataLoader: "data_loader",
    Vocabulary: "vocabulary",
    DdpAccelerator: "distributed.ddp_accelerator",
}

_FROM_PARAMS = "allennlp.common.from_params"

# How far up a part can have been handed on to what constructs it.
_MAX_FRAMES_OF_A_PART = 6

_MAX_LINES, _MAX_LENGTH = 6, 1_200


def explanation(error: BaseException) -> Optional[str]:
    """
    # Parameters

    error : `BaseException`, required.
        That has been raised.

    # Returns

    `Optional[str]`
        A few lines with the section of the config that it was raised for. `None` if it wasn't
        raised while AllenNLP constructed something, or if that had come to reading data.
    """
    section = section_of(error)
    if section is None:
        return None
    message = " ".join([_in_short(error), *_reasons(error)])
    if isinstance(error, ConfigurationError) and f"'{section.rpartition('.')[2]}" in message:
        return message
    return f"'{section}': {message}" if section else message


def section_of(error: BaseException) -> Optional[str]:
    """
    The keys that lead to what was being constructed, joined by dots. Empty if it was the train loop
    itself, and `None` if it was nothing or if data were being read for it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(_reads_data(frame) for frame in frames):
        return None
    is_construction = False
    names: List[str] = []
    # Whether the part that is constructed is that of the frame before, put into another one.
    is_same_part = False
    for index, frame in enumerate(frames):
        if _is_lazy(frame):
            if not is_same_part:
                names = _names_of_part(frame.f_locals["self"], frames[:index], names)
            is_same_part = True
            continue
        if frame.f_globals.get("__name__") != _FROM_PARAMS:
            continue
        is_same_part = False
        is_construction = True
        function = frame.f_code.co_name
        if function == "from_params" and not names:
            names = _names_of_command(frame, frames[index - 1])
        elif function == "pop_and_construct_arg":
            names.append(frame.f_locals["argument_name"])
        elif function == "construct_arg" and names:
            # With the index or the key of what is in a list or an object.
            names[-1] = frame.f_locals["argument_name"]
    return ".".join(names) if is_construction else None


def _reads_data(frame: FrameType) -> bool:
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name in ("read", "_read") and isinstance(owner, DatasetReader)


def _is_lazy(frame: FrameType) -> bool:
    return frame.f_code.co_name == "construct" and isinstance(frame.f_locals.get("self"), Lazy)


def _names_of_part(part: Any, frames: List[FrameType], names: List[str]) -> List[str]:
    """The argument as which a constructor was given a part that it constructs, by its value."""
    for frame in reversed(frames[-_MAX_FRAMES_OF_A_PART:]):
        for name, value in frame.f_locals.items():
            for key, item in [(name, value), *_items(value, name)]:
                if item is part and key.partition(".")[0] in _PARTS:
                    return [*names, key]
    return names


def _items(value: Any, name: str) -> Iterator[Tuple[str, Any]]:
    """What is in a dictionary of arguments, or in a list that is one."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key), item
            yield from _items(item, str(key)) if isinstance(item, list) else ()
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{name}.{index}", item


def _names_of_command(frame: FrameType, caller: FrameType) -> List[str]:
    if caller.f_code.co_name not in (
        "data_loaders_from_params",
        "make_vocab_from_params",
        "_train_worker",
    ):
        return []
    cls = frame.f_locals.get("cls")
    return [name for base, name in _OF_THE_COMMAND.items() if cls is base]


_PARTS = (
    "callbacks",
    "checkpointer",
    "data_loader",
    "dataset_reader",
    "learning_rate_scheduler",
    "model",
    "momentum_scheduler",
    "moving_average",
    "optimizer",
    "trainer",
    "validation_data_loader",
    "validation_dataset_reader",
    "vocabulary",
)


def _in_short(error: BaseException) -> str:
    text = error.message if isinstance(error, ConfigurationError) else str(error)
    # Without the stack that an error of C++'s comes with.
    text = text.partition("\nException raised from")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    text = "\n".join(lines[:_MAX_LINES])[:_MAX_LENGTH]
    return text if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {text}"


def _reasons(error: BaseException) -> Iterator[str]:
    """Why none of the types that an argument can have was one that it could be constructed as."""
    cause = error.__cause__
    if not str(error).startswith("Failed to construct argument"):
        return
    while cause is not None:
        yield f"({': '.join(map(str, cause.args))})"
        cause = cause.__cause__
