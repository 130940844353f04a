"""
How far texts are padded, and parts of batches that are padded less far.
"""

from typing import Any, Dict, Iterable, Iterator, List, Tuple

import torch
from allennlp.data import TextFieldTensors

# By the names that AllenNLP's indexers give their tensors: which dimension has the tokens, counted
# from the last.
_DIMENSIONS = {
    "tokens": 1,
    "token_characters": 2,
    "token_ids": 1,
    "type_ids": 1,
    "offsets": 2,
    "mask": 1,
    "wordpiece_mask": 1,
    "segment_concat_mask": 1,
}

# Those with padding of 0 that have no mask beside them.
_WITHOUT_MASK = ("tokens", "token_characters")


class TextLengths:
    """
    How long the texts of a batch are. The host waits for the device once.

    # Parameters

    inputs : `Dict[str, Any]`, required.
        Of a model. Other than text fields of AllenNLP's indexers aren't looked at.
    batch_size : `int`, required.
    """

    def __init__(self, inputs: Dict[str, Any], batch_size: int) -> None:
        self._batch_size = batch_size
        # By the name of a text field and how far it is padded, which may not be the same for words
        # and their pieces. Shape: (batch_size,)
        ends: Dict[Tuple[str, int], torch.Tensor] = {}
        for name, value in inputs.items():
            for mask in _masks(value) if _is_text(value) else ():
                key = name, mask.size(-1)
                ends[key] = torch.maximum(ends[key], _ends(mask)) if key in ends else _ends(mask)
        masks = list(ends.values())
        self.device = masks[0].device if masks else torch.device("cpu")
        of_all = torch.stack(masks).tolist() if masks else []
        self._lengths: Dict[Tuple[str, int], List[int]] = dict(zip(ends, of_all))

    @property
    def is_much_padded(self) -> bool:
        """Whether there are texts, and one of each field has as much padding as tokens, or more."""
        lengths = self._lengths.items()
        return bool(lengths) and all(2 * min(ends) <= size for (_, size), ends in lengths)

    @property
    def shortest(self) -> List[int]:
        """For each field, the index of its shortest text."""
        fields = dict.fromkeys(name for name, _ in self._lengths)
        return [self.order([name])[-1] for name in fields]

    def order(self, fields: Iterable[str]) -> List[int]:
        """
        Indices of all examples, the longest first, so that what needs the most memory comes at
        once.

        # Parameters

        fields : `Iterable[str]`, required.
            Whose lengths are summed.
        """
        of_fields = [ends for (name, _), ends in self._lengths.items() if name in fields]
        return sorted(range(self._batch_size), key=lambda i: -sum(ends[i] for ends in of_fields))

    def trimmed(self, inputs: Dict[str, Any], indices: List[int], least: int) -> Dict[str, Any]:
        """
        Some of the examples, padded as far as the longest of them needs.

        # Parameters

        inputs : `Dict[str, Any]`, required.
            Of these examples alone.
        indices : `List[int]`, required.
            Which of the batch they are.
        least : `int`, required.
            The least number of tokens that is left.

        # Returns

        `Dict[str, Any]`
            Other than text fields are as they were.
        """
        longest: Dict[str, Dict[int, int]] = {}
        for (name, size), ends in self._lengths.items():
            longest.setdefault(name, {})[size] = max(least, *(ends[i] for i in indices))
        return {
            name: _trimmed(value, longest[name]) if name in longest else value
            for name, value in inputs.items()
        }


def longest_window(model: torch.nn.Module) -> int:
    """Tokens that a text needs at least so that each convolution of a model fits into it."""
    windows = [1]
    for module in model.modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            windows += [
                (size - 1) * dilation + 1
                for size, dilation in zip(module.kernel_size, module.dilation)
            ]
    return max(windows)


def _is_text(value: Any) -> bool:
    """Whether it is a text field of indexers that are known."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(tensors, dict) and bool(tensors) for tensors in value.values())
        and all(
            name in _DIMENSIONS
            and isinstance(tensor, torch.Tensor)
            and not tensor.is_floating_point()  # vectors, as of spaCy's indexer
            for tensors in value.values()
            for name, tensor in tensors.items()
        )
        and next(_masks(value), None) is not None
    )


def _masks(text: TextFieldTensors) -> Iterator[torch.Tensor]:
    """Of shape (batch_size, ..., num_tokens), where there are tokens."""
    for tensors in text.values():
        masks = [tensor for tensor in tensors.values() if tensor.dtype == torch.bool]
        yield from masks
        if not masks:
            for name in _WITHOUT_MASK:
                if name in tensors:
                    is_token = tensors[name] != 0
                    yield is_token.any(dim=-1) if name == "token_characters" else is_token


def _ends(mask: torch.Tensor) -> torch.Tensor:
    """For each example, up to where there is a token in any of its texts. Shape: (batch_size,)"""
    positions = torch.arange(1, mask.size(-1) + 1, device=mask.device)
    # With a zero, because texts may have no token at all.
    return torch.nn.functional.pad((mask * positions).flatten(1), (0, 1)).amax(dim=1)


def _trimmed(text: TextFieldTensors, lengths: Dict[int, int]) -> TextFieldTensors:
    """
    # Parameters

    lengths : `Dict[int, int]`
        To which those tensors are cut that are padded so far.
    """

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dimension = tensor.dim() - _DIMENSIONS[name]
        size = tensor.size(dimension)
        # Models may take views of them, as of the whole.
        return tensor.narrow(dimension, 0, min(size, lengths.get(size, size))).contiguous()

    return {
        indexer: {name: cut(name, tensor) for name, tensor in tensors.items()}
        for indexer, tensors in text.items()
    }
