"""
Fixtures for the tests with several hosts.
"""

from pathlib import Path
from typing import Callable, Iterator

import pytest

from tests.support.hosts import Hosts, missing_right


@pytest.fixture(scope="session")
def right_to_make_hosts() -> None:
    reason = missing_right()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def make_hosts(right_to_make_hosts: None, tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """Makes so many hosts in a network of their own, which are gone after the test."""
    made = []

    def make(count: int) -> Hosts:
        made.append(Hosts(count, tmp_path))
        return made[-1]

    yield make
    for hosts in made:
        hosts.remove()


@pytest.fixture
def two_hosts(make_hosts: Callable[[int], Hosts]) -> Hosts:
    return make_hosts(2)


@pytest.fixture
def three_hosts(make_hosts: Callable[[int], Hosts]) -> Hosts:
    return make_hosts(3)
