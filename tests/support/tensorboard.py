"""
Reads what TensorBoard would show.
"""

import struct
from pathlib import Path
from typing import Any, Dict, List, Tuple

from tensorboardX.proto.event_pb2 import Event


def events(directory: Path) -> Dict[str, List[Tuple[int, Any]]]:
    """
    Steps and values by tag, from records as TensorFlow writes them. A scalar's value is a number; a
    histogram's has the attributes `min`, `max`, `num`, `sum`, `sum_squares`, `bucket_limit` and
    `bucket`.
    """
    values: Dict[str, List[Tuple[int, Any]]] = {}
    for path in directory.glob("events.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # and 4 bytes of checksum, twice
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                values.setdefault(value.tag, []).append((event.step, getattr(value, kind)))
            data = data[16 + length :]
    return values
