"""Include this to have the agent of node 1 be late with what follows the barrier at the end."""

import sys
import time
from typing import Any

from torch.distributed.elastic.utils import store as store_util

_SECONDS = 3.0

_barrier = store_util.barrier


def barrier(*args: Any, **kwargs: Any) -> None:
    _barrier(*args, **kwargs)
    if "1" in sys.argv[sys.argv.index("--node-rank") :]:
        time.sleep(_SECONDS)


store_util.barrier = barrier
