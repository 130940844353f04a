"""
Writes and reads `metrics.jsonl`, a training's metrics for programs. docs/console.md documents the
format.
"""

import json
import logging
import math
import os
import threading
import time
from typing import Any, Dict, Iterator

from allennlp.common.util import sanitize

from allennlp_deepspeed import files
from allennlp_deepspeed.config.json_types import is_integer

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"

# Written when the steps of an epoch are completed, and the epoch isn't yet.
_KINDS_OF_EPOCHS = ("epoch", "completions")

# Maximum seconds that lines are buffered.
_INTERVAL = 1.0

# The maximum number of steps and epochs: JavaScript represents larger integers inexactly.
_MAX_COUNT = 2**53


class MetricsFile:
    """
    Writes one JSON object per line. Lines are complete, except possibly the last one after a full
    disk or a crash. For one process with any number of threads. No method waits for a device or
    another process. Forked processes, such as a data loader's workers, write nothing.

    # Parameters

    serialization_dir : `str`, required.
    """

    def __init__(self, serialization_dir: str) -> None:
        self.path = os.path.join(serialization_dir, FILE_NAME)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._buffer = b""
        self._flush_time = -math.inf
        self._has_failed = False

    def start(self, num_epochs: int, num_steps: int) -> None:
        """
        Removes the lines from after a point in time, which the training will write again, in one
        rename. Earlier lines remain.

        # Parameters

        num_epochs : `int`, required.
            Epochs completed at that point. 0, with 0 steps, for a training that starts from
            scratch.
        num_steps : `int`, required.
            Optimizer steps completed at that point, over all epochs.
        """
        with self._lock:
            self._buffer = b""
            if not os.path.exists(self.path):
                return
            kept = ""
            if num_steps > 0:
                for line in read(self.path):
                    is_of_epoch = line["kind"] in _KINDS_OF_EPOCHS
                    if line["step"] <= num_steps and not (
                        is_of_epoch and line["epoch"] >= num_epochs
                    ):
                        kept += _to_json(line) + "\n"
            unfinished = f"{self.path}.unfinished"
            files.write(kept, unfinished)
            files.flush(unfinished)
            files.rename(unfinished, self.path)

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """
        Adds a line, which may be buffered until the next `flush`.

        # Parameters

        kind : `str`, required.
        step : `int`, required.
            Optimizer steps completed, over all epochs.
        epoch : `int`, required.
            The epoch, from 0.
        values : `Any`
            The values of the line. `None` is left out.
        """
        if os.getpid() != self._process:
            return
        line = {"kind": kind, "time": round(time.time(), 3), "step": step, "epoch": epoch}
        line.update({name: value for name, value in values.items() if value is not None})
        text = _to_json(line) + "\n"
        with self._lock:
            self._buffer += text.encode()
            if time.monotonic() - self._flush_time > _INTERVAL:
                self.flush()

    def flush(self) -> None:
        """Writes the buffered lines. Lines that can't be written remain in the buffer."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._flush_time = time.monotonic()
            if not self._buffer:
                return
            try:
                # Opened each time, so that a fork doesn't inherit it, and another host sees the
                # lines.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                descriptor = os.open(self.path, flags, 0o666)
                try:
                    self._buffer = self._buffer[os.write(descriptor, self._buffer) :]
                finally:
                    os.close(descriptor)
            except OSError as error:
                # Only logged: metrics aren't essential, and saving a checkpoint will fail with the
                # same error.
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("Could not write %s: %s", self.path, error)


def read(path: str) -> Iterator[Dict[str, Any]]:
    """
    Yields the complete lines of a metrics file, also while it is being written.

    # Parameters

    path : `str`
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_valid(line):
                yield line


def _is_valid(line: Dict[str, Any]) -> bool:
    counts = [line.get("step"), line.get("epoch")]
    return isinstance(line.get("kind"), str) and all(
        is_integer(count) and 0 <= count < _MAX_COUNT for count in counts
    )


def _to_json(line: Dict[str, Any]) -> str:
    return json.dumps(_plain(line), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    """Converts a value to plain data, with `None` for numbers that JSON doesn't have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return _plain(sanitize(value))  # NumPy's and PyTorch's
    except (ValueError, RecursionError):
        return str(value)
