"""
Files of weights and optimizer states by the names of parameters, in the format of safetensors.

Each rank writes `state_w{rank}.safetensors`, with the elements that it owns of each parameter as
flat tensors `{parameter}|{kind}`. The kind is `weight` (what the optimizer updates, or a frozen
weight in the model's precision), `average` (of a moving average) or `state.{key}` (of the
optimizer). The metadata is a record in JSON:

- `fragments`: by parameter its first element here, the number of elements, and the index of the
  master weight that they are in, -1 for frozen parameters.
- `numbers`: the optimizer's states that are numbers, by parameter and key.
- `whole`: the tensors that are of a whole master weight, and not of its elements.
- `others`: the keys of further states, which are in the rank's training state, by parameter.
- `module`: the keys of the model's `state_dict`, each with the first name of its parameter, or
  `null` for a buffer, whose kind is `buffer`. It is in the file of a directory's first rank.
"""

import json
import math
import os
import re
from typing import Any, Collection, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from safetensors import SafetensorError, safe_open

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import serialization
from allennlp_deepspeed.checkpoint.commit_record import (
    CheckpointError,
    CommitRecord,
    training_state_name,
)
from allennlp_deepspeed.config.json_types import is_count

WEIGHT, AVERAGE, BUFFER, STATE = "weight", "average", "buffer", "state."

ENGINE = "engine"
"""The key of the training state with what the engine has besides these files."""

Layout = List[Tuple[str, int, int]]

_NAME = re.compile(r"state_w(\d+)\.safetensors")
_RECORD = "allennlp_deepspeed"


def tensor_name(parameter: str, kind: str) -> str:
    return f"{parameter}|{kind}"


def file_path(directory: str, rank: int) -> str:
    """Returns the path of a rank's file in a checkpoint."""
    return os.path.join(directory, f"state_w{rank}.safetensors")


def save(tensors: Dict[str, torch.Tensor], record: Dict[str, Any], path: str) -> None:
    """Writes a rank's file."""
    files.save_tensors(tensors, {_RECORD: json.dumps(record)}, path)


class _File(NamedTuple):
    """
    An open file of a rank.

    # Parameters

    tensors : `Any`
        The result of `safe_open`.
    record : `Dict[str, Any]`
    fragments : `Dict[str, Tuple[int, int, int]]`
        Of the record.
    kinds : `Dict[str, List[str]]`
        The kinds of tensors of each parameter.
    """

    tensors: Any
    record: Dict[str, Any]
    fragments: Dict[str, Tuple[int, int, int]]
    kinds: Dict[str, List[str]]

    @classmethod
    def open(cls, path: str) -> "_File":
        try:
            tensors = safe_open(path, "pt")
            record = json.loads((tensors.metadata() or {})[_RECORD])
            fragments = {name: _fragment(*value) for name, value in record["fragments"].items()}
            for section in ("numbers", "others", "module"):
                record[section].items()
            kinds: Dict[str, List[str]] = {}
            for key in tensors.keys():  # noqa: SIM118
                name, _, kind = key.rpartition("|")
                kinds.setdefault(name, []).append(kind)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing.") from None
        except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
            # Not chained, as for other files.
            message = serialization.describe_other_file(path, str(error))
        else:
            return cls(tensors, record, fragments, kinds)
        raise CheckpointError(message)

    def has(self, parameter: str, kind: str) -> bool:
        return kind in self.kinds.get(parameter, ())

    def get(self, parameter: str, kind: str) -> torch.Tensor:
        return self.tensors.get_tensor(tensor_name(parameter, kind))

    def dtype(self, parameter: str, kind: str) -> Optional[torch.dtype]:
        if not self.has(parameter, kind):
            return None
        return self.tensors.get_slice(tensor_name(parameter, kind))[:0].dtype

    def layout(self, parameter: str) -> Layout:
        """Returns the fragments in the master weight of a parameter."""
        index = self.fragments[parameter][2]
        return [(name, *f[:2]) for name, f in self.fragments.items() if f[2] == index]


def _fragment(offset: int, size: int, index: int) -> Tuple[int, int, int]:
    if not (is_count(offset) and is_count(size) and is_count(index, minimum=-1)):
        raise ValueError("wrong value of 'fragments'")
    return offset, size, index


class SavedState(NamedTuple):
    """
    The optimizer state of a parameter.

    # Parameters

    numbers : `Dict[str, Any]`
        Numbers, and tensors of one, by key.
    elementwise : `Dict[str, Optional[torch.dtype]]`
        The types of states with an element for each of the parameter, by key, with `None` for that
        of the weight.
    whole : `Dict[str, Optional[torch.Tensor]]`
        Those of a whole master weight, by key, with `None` for those that are in the training
        state.
    layout : `List[Tuple[str, int, int]]`
        What the master weight consists of: parameters, with their first element and their number
        of elements.
    """

    numbers: Dict[str, Any]
    elementwise: Dict[str, Optional[torch.dtype]]
    whole: Dict[str, Optional[torch.Tensor]]
    layout: Layout


class StateFiles:
    """
    The files of a checkpoint as its ranks wrote them. A file is opened when it is needed, and
    tensors are read on access: a rank that reads what it wrote opens its own file, and at most
    that of the first rank.

    # Parameters

    directory : `str`, required.
        An undamaged checkpoint.
    rank : `int`, optional (default = `0`)
        The rank whose file is looked into first.

    # Raises

    `CheckpointError`
        By each method, if a file wasn't written by this package, or doesn't have what is read.
    """

    def __init__(self, directory: str, rank: int = 0) -> None:
        self.directory = directory
        ranks = [int(match[1]) for match in map(_NAME.fullmatch, os.listdir(directory)) if match]
        if not ranks:
            raise CheckpointError(f"{file_path(directory, 0)} is missing.")
        self._ranks = sorted(ranks, key=lambda each: (each != rank, each))
        self._opened: List[_File] = []

    def _files(self) -> Iterator[_File]:
        for index, rank in enumerate(self._ranks):
            if index == len(self._opened):
                self._opened.append(_File.open(file_path(self.directory, rank)))
            yield self._opened[index]

    def _file_of(self, parameter: str) -> _File:
        for file in self._files():
            if parameter in file.fragments:
                return file
        raise CheckpointError(
            f"{self.directory} lacks the parameter '{parameter}': the files of all workers are "
            "needed, and frozen weights on NVMe aren't in them."
        )

    def has_average(self, parameters: Collection[str]) -> bool:
        """Returns whether any of these parameters has a moving average, as far as it is here."""
        files = self._files()
        return any(file.has(parameter, AVERAGE) for file in files for parameter in parameters)

    def state(self, parameter: str) -> SavedState:
        """Returns the optimizer state of a parameter."""
        file = self._file_of(parameter)
        numbers = dict(file.record["numbers"].get(parameter, {}))
        whole = dict.fromkeys(file.record["others"].get(parameter, ()))
        elementwise: Dict[str, Optional[torch.dtype]] = {}
        for kind in sorted(file.kinds.get(parameter, ())):
            name, key = tensor_name(parameter, kind), kind.removeprefix(STATE)
            if name in file.record["whole"]:
                whole[key] = file.get(parameter, kind)
            elif kind.startswith(STATE) and not file.tensors.get_slice(name).get_shape():
                numbers[key] = file.get(parameter, kind)
            elif kind.startswith(STATE):
                types = {file.dtype(parameter, each) for each in (kind, WEIGHT)}
                elementwise[key] = None if len(types) == 1 else file.dtype(parameter, kind)
        return SavedState(numbers, elementwise, whole, file.layout(parameter))

    def read(self, parameter: str, kind: str, offset: int, size: int) -> torch.Tensor:
        """
        Returns a range of a parameter's elements, or of what has one for each of them: `size`
        elements from `offset` on.
        """
        result = None
        covered = {}  # by the first element: what all ranks have is in several files
        for file in self._files():
            if not file.has(parameter, kind) or parameter not in file.fragments:
                continue
            start, numel, _ = file.fragments[parameter]
            low, high = max(offset, start), min(offset + size, start + numel)
            if low < high and low not in covered:
                name = tensor_name(parameter, kind)
                part = file.tensors.get_slice(name)[low - start : high - start]
                if len(part) == size:
                    return part
                result = part.new_empty(size) if result is None else result
                result[low - offset : high - offset] = part
                covered[low] = high - low
                if sum(covered.values()) == size:
                    return result
        if size == 0:
            return torch.empty(0)
        raise CheckpointError(
            f"{self.directory} has {sum(covered.values())} of {size} elements of '{parameter}' "
            f"({kind}): the files of all workers are needed."
        )

    def buffers(self) -> Dict[str, torch.Tensor]:
        """Returns the buffers in the model's `state_dict`."""
        file = self._first()
        module = file.record["module"]
        return {key: file.get(key, BUFFER) for key, name in module.items() if name is None}

    def _first(self) -> _File:
        """Returns the file of the first rank of a directory."""
        for file in self._files():
            if file.record["module"]:
                return file
        raise CheckpointError(f"{self.directory} lacks the file of the first worker.")

    def state_dict(self) -> Dict[str, Any]:
        """
        Returns the `state_dict` of the same model on one CPU in fp32, with tied parameters tied.
        Where there is a moving average, it contains the averaged weights, which AllenNLP validates
        and archives. In addition to the result it needs the memory of one parameter.
        """
        shapes = CommitRecord.read(self.directory).parameters
        rank = self._ranks[self._opened.index(self._first())]
        training_state = os.path.join(self.directory, training_state_name(rank))
        others = serialization.load(training_state, mmap=True)[ENGINE]["module"]
        buffers = self.buffers()
        weights: Dict[str, torch.Tensor] = {}
        state_dict: Dict[str, Any] = {}
        for key, name in self._first().record["module"].items():
            if name is not None and name not in weights:
                kind = AVERAGE if self.has_average([name]) else WEIGHT
                size = math.prod(shapes[name])
                weights[name] = to_fp32(self.read(name, kind, 0, size)).view(shapes[name])
            state_dict[key] = to_fp32(buffers[key]) if name is None else weights[name]
        return {**state_dict, **others}


def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor
