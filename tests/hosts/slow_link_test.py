"""The link of the study of slow networks. How slow it is, the study measures each time."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.slow_link import SlowLink, missing_right, receive

NUM_BYTES = 5_000_001
LARGEST_PIECE = 200_000


@pytest.fixture(autouse=True, scope="module")
def right_to_make_links() -> None:
    reason = missing_right()
    if reason is not None:
        pytest.skip(reason)


def test_bytes_arrive_as_they_were_sent_in_both_directions_at_once(tmp_path: Path) -> None:
    generator = random.Random(13)
    message, answer = generator.randbytes(NUM_BYTES), generator.randbytes(NUM_BYTES)
    with (
        SlowLink(tmp_path, rate=1e9, delay=0.005) as link,
        ThreadPoolExecutor(3) as threads,
    ):
        one, other = link.connect()
        with one, other:
            sending = [
                threads.submit(_send_in_pieces, one, message),
                threads.submit(_send_in_pieces, other, answer),
            ]
            received = threads.submit(receive, one, NUM_BYTES)
            assert receive(other, NUM_BYTES) == message
            assert received.result() == answer
            for each in sending:
                each.result()


def _send_in_pieces(connection: socket.socket, data: bytes) -> None:
    """Of all sizes, as collectives send them."""
    generator = random.Random(13)
    while data:
        size = int(LARGEST_PIECE ** generator.random())
        connection.sendall(data[:size])
        data = data[size:]


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with SlowLink(tmp_path, rate=1e9, delay=0.005) as link:
        during = set(psutil.Process().children(recursive=True))
        assert link.measure(1_000_000).bits_per_second > 0
    assert len(during) > len(before)
    assert set(psutil.Process().children(recursive=True)) == before
