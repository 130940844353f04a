from typing import Iterator

import pytest

from tests.upstream.unpatched import Unpatched


@pytest.fixture(scope="session")
def unpatched() -> Iterator[Unpatched]:
    process = Unpatched()
    yield process
    process.close()
