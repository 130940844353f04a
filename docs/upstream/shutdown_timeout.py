"""When a worker has failed, `torchrun --shutdown-timeout 1` waits 30 seconds for the others."""

import os
import signal
import sys
import tempfile
import time


def worker(directory):
    """The second ignores SIGTERM for some seconds, until after the first has failed."""
    if os.environ["RANK"] == "0":
        while not os.path.exists(f"{directory}/ready"):
            time.sleep(0.1)
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{directory}/ready", "w").close()
    time.sleep(5)
    open(f"{directory}/survived", "w").close()
    os._exit(0)


def survives(entrypoint, *args):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=1,
    )
    with tempfile.TemporaryDirectory() as directory:
        try:
            elastic_launch(config, entrypoint)(*args, directory)
        except ChildFailedError:
            return os.path.exists(f"{directory}/survived")
    raise AssertionError("The first worker has failed.")


if __name__ == "__main__" and len(sys.argv) > 1:
    worker(sys.argv[1])
elif __name__ == "__main__":
    how = {"a function": (worker,), "a command": (sys.executable, __file__)}
    found = [name for name, entrypoint in how.items() if survives(*entrypoint)]
    if found:
        sys.exit(f"fault: workers of {' and '.join(found)} get more than a second")
