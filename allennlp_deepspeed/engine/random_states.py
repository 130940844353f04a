"""
The states of all random number generators of a worker.
"""

import random
import zlib
from itertools import accumulate, pairwise
from typing import Any, Dict, List, Sequence

import numpy as np
import torch

# Of a Mersenne Twister. Python has its position among them, as one more.
_NUM_WORDS = 624
_WORD = np.dtype("<u4")
_FLOAT = np.dtype("<f8")
_PYTHON_VERSION = random.getstate()[0]


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


class RandomHistory:
    """
    The random states of several points in time, compressed together. A generator adds 2.6 kB to
    each of them, which can't be made less, and next to nothing if it hasn't been used since the
    point before.
    """

    def __init__(self, points: Sequence[bytes] = ()) -> None:
        self._points: List[bytes] = []
        self._compressor = zlib.compressobj()
        self._compressed = bytearray()
        for point in points:
            self._append(point)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        """As `random_states` gave them."""
        return _from_bytes(self._points[index])

    def append(self, states: Dict[str, Any]) -> None:
        """
        # Parameters

        states : `Dict[str, Any]`, required.
            As `random_states` gave them.
        """
        self._append(_to_bytes(states))

    def _append(self, point: bytes) -> None:
        self._points.append(point)
        self._compressed += self._compressor.compress(point)
        self._compressed += self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def state_dict(self) -> Dict[str, Any]:
        # As a tensor, because bytes would be pickled as text, with half as much again.
        compressed = torch.from_numpy(np.frombuffer(self._compressed, np.uint8).copy())
        return {"lengths": [len(point) for point in self._points], "compressed": compressed}

    @classmethod
    def from_state_dict(cls, state_dict: Dict[str, Any], length: int) -> "RandomHistory":
        """
        # Parameters

        state_dict : `Dict[str, Any]`, required.
        length : `int`, required.
            How many of the points to take, from the first.
        """
        decompressor = zlib.decompressobj()
        joined = decompressor.decompress(state_dict["compressed"].numpy().tobytes())
        ends = list(accumulate(state_dict["lengths"][:length], initial=0))
        return cls([joined[start:end] for start, end in pairwise(ends)])


def _to_bytes(states: Dict[str, Any]) -> bytes:
    _, python_words, python_gauss = states["python"]
    _, numpy_words, numpy_position, numpy_has_gauss, numpy_gauss = states["numpy"]
    integers = [*python_words, *numpy_words, numpy_position, numpy_has_gauss]
    floats = [np.nan if python_gauss is None else python_gauss, numpy_gauss]
    # PyTorch has 64 bits for each word, of which the upper half is zero.
    torch_words = states["torch"].numpy().view(_WORD)
    parts = [
        np.array(integers, _WORD),
        np.array(floats, _FLOAT),
        torch_words[0::2],
        torch_words[1::2],
    ]
    if "cuda" in states:
        parts.append(states["cuda"].numpy())
    return b"".join(part.tobytes() for part in parts)


def _from_bytes(point: bytes) -> Dict[str, Any]:
    position = 0

    def read(dtype: Any, count: int = -1) -> np.ndarray:
        nonlocal position
        array = np.frombuffer(point, dtype, count, position)
        position += array.nbytes
        return array

    python_words = tuple(map(int, read(_WORD, _NUM_WORDS + 1)))
    numpy_words, (numpy_position, numpy_has_gauss) = read(_WORD, _NUM_WORDS), read(_WORD, 2)
    python_gauss, numpy_gauss = map(float, read(_FLOAT, 2))
    torch_size = torch.get_rng_state().numel()
    halves = read(_WORD, torch_size // _WORD.itemsize).reshape(2, -1)
    states = {
        "python": (_PYTHON_VERSION, python_words, None if np.isnan(python_gauss) else python_gauss),
        "numpy": (
            "MT19937",
            numpy_words,
            int(numpy_position),
            int(numpy_has_gauss),
            numpy_gauss,
        ),
        "torch": torch.from_numpy(halves.T.copy().view(np.uint8).reshape(-1)),
    }
    if position < len(point):
        states["cuda"] = torch.from_numpy(read(np.uint8).copy())
    return states
