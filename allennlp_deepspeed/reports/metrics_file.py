"""
`metrics.jsonl`: what a training says of itself, for programs. docs/console.md has its format.
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
from allennlp_deepspeed.config.values import is_integer

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"

# Seconds for which lines may wait in memory.
_INTERVAL = 1.0

# Of steps and epochs, which JavaScript can tell from the next one.
_MAX_COUNT = 2**53


class MetricsFile:
    """
    Writes a JSON object a line. A line is whole or it isn't there, but for one that a full disk or
    a crash has cut, which is the last. For one process, which may have several threads; nothing in
    it waits for a device or another process. What is forked from it, such as a data loader's
    worker, has it too and writes nothing.

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
        Keeps what there is of a training from before a point in time, and drops what the training
        will do again, in one rename.

        # Parameters

        num_epochs : `int`, required.
            That had been completed there; 0 with 0 steps for a training that begins anew.
        num_steps : `int`, required.
            Optimizer steps of all epochs that had been completed there.
        """
        with self._lock:
            self._buffer = b""
            if not os.path.exists(self.path):
                return
            kept = ""
            if num_steps > 0:
                for line in read(self.path):
                    is_later_epoch = line["kind"] == "epoch" and line["epoch"] >= num_epochs
                    if line["step"] <= num_steps and not is_later_epoch:
                        kept += _to_json(line) + "\n"
            unfinished = f"{self.path}.unfinished"
            files.write(kept, unfinished)
            files.flush(unfinished)
            files.rename(unfinished, self.path)

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """
        Adds a line, which may stay in memory until the next `flush`.

        # Parameters

        kind : `str`, required.
        step : `int`, required.
            Optimizer steps of all epochs that had been completed then.
        epoch : `int`, required.
            From 0.
        values : `Any`
            Those that are `None` are left out.
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
        """Writes the lines that are in memory. What can't be written is kept for the next time."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._flush_time = time.monotonic()
            if not self._buffer:
                return
            try:
                # Opened each time, so that a fork doesn't have it, and another host sees the lines.
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    self._buffer = self._buffer[os.write(descriptor, self._buffer) :]
                finally:
                    os.close(descriptor)
            except OSError as error:
                # Not what a training is for. What it is for will fail of the same.
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("%s can't be written: %s", self.path, error)


def read(path: str) -> Iterator[Dict[str, Any]]:
    """
    The lines of a metrics file that are whole, also while it is written.

    # Parameters

    path : `str`
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_sound(line):
                yield line


def _is_sound(line: Dict[str, Any]) -> bool:
    counts = [line.get("step"), line.get("epoch")]
    return isinstance(line.get("kind"), str) and all(
        is_integer(count) and 0 <= count < _MAX_COUNT for count in counts
    )


def _to_json(line: Dict[str, Any]) -> str:
    return json.dumps(_plain(line), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    """With `None` for what JSON has no number for."""
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
