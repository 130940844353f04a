from typing import Iterator

import pytest

from tests.upstream.unmended import Unmended


@pytest.fixture(scope="session")
def unmended() -> Iterator[Unmended]:
    process = Unmended()
    yield process
    process.close()
