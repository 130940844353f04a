"""
Fixtures for all tests.
"""

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Generator, List, Optional

import pytest

# A shell that runs tests in the background ignores Ctrl-C in its place, and so would all commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports leave no garbage, and looking for it takes a sixth of their time.
gc.disable()

pytest.register_assert_rewrite("tests.support.command", "tests.support.experiment")

from tests.support import forked_memory, shared_server  # noqa: E402
from tests.support.messages import expect_message, messages  # noqa: E402, F401

if TYPE_CHECKING:
    from tests.support.experiment import Experiments


def _only_hands_out_tests(config: pytest.Config) -> bool:
    """To pytest's workers. It needs nothing of what they import."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if _only_hands_out_tests(config):
        if not config.option.collectonly:
            shared_server.start()
        return
    import torch

    from tests.support import seeding  # noqa: F401

    # Tests run beside one another, and threads that wait for a core they share take many times
    # longer.
    torch.set_num_threads(1)
    if shared_server.ADDRESS in os.environ:
        shared_server.use()


@pytest.fixture(scope="session")
def session_directory(tmp_path_factory: pytest.TempPathFactory, request) -> Path:
    """A temporary directory that all processes of the test session share."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if hasattr(request.config, "workerinput") else directory


@pytest.fixture(scope="session")
def experiments(session_directory: Path) -> "Experiments":
    """Runs experiments with the `allennlp` command, each config once a test session."""
    from tests.support.experiment import Experiments

    return Experiments(session_directory / "experiments")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """
    Weights that a test draws are the same in any order of tests, and not those of a fixture that
    another test has left the seed of.
    """
    import torch

    torch.manual_seed(20)


@pytest.hookimpl(tryfirst=True)  # before those with the mark are left out
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """
    Leaves to `make soak` the cases of tests that `soak_cases` names, and trainings at ZeRO stage 1
    where the same test has them at stage 2: DeepSpeed has one optimizer for both, and the two
    differ in when gradients are reduced, which `gradient_synchronization_test.py` is about. Two
    cases are the same if their names are with a 2 for each 1: a case that has another 1 in its name
    runs at both stages.

    Tests that fork workers come first: a fork doesn't take along the threads that an engine has
    started in this process, and can wait for what they held.
    """
    forks = ("run_workers", "multiprocessing")
    items.sort(key=lambda item: not any(hasattr(item.module, name) for name in forks))  # type: ignore[attr-defined]
    _spread(items)
    names = {(item.path, item.name) for item in items}
    for item in items:
        long = item.get_closest_marker("soak_cases")
        if long is not None and item.callspec.id in long.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.soak)
        is_training = item.path.parent.name == "end_to_end" and "synchron" not in item.path.name
        stage = item.callspec.params.get("stage") if hasattr(item, "callspec") else None
        if is_training and stage == 1 and (item.path, item.name.replace("1", "2")) in names:
            item.add_marker(pytest.mark.soak)


# Beside all that run on several hosts.
_WAITING = ("watchdog_test.py",)


def _spread(items: List[pytest.Item]) -> None:
    """
    Puts tests that wait for time limits between others, before most of those of single objects,
    which are short: together they would leave the cores idle.
    """

    def waits(item: pytest.Item) -> bool:
        return item.path.parent.name == "hosts" or item.path.name in _WAITING

    waiting = [item for item in items if waits(item)]
    others = [item for item in items if not waits(item)]
    num_long = sum("unit" not in item.path.parts for item in others)
    for i, item in enumerate(waiting):
        others.insert(i * num_long // len(waiting) + i, item)
    items[:] = others


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    if not _only_hands_out_tests(session.config):
        _freeze()
        forked_memory.prepare()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: Optional[pytest.Item]
) -> Generator[None, object, object]:
    result = yield
    import torch

    # A test that has asked for more would have those after it take ten times as long.
    torch.set_num_threads(1)
    # Nothing is left of the test by now but what is garbage. A process group that is frozen as long
    # as the test holds it would stay, and its thread looks for news a hundred times a second.
    if nextitem is not None:
        if len(sys.modules) > _num_modules_frozen or nextitem.path != item.path:
            _freeze()
        elif threading.active_count() < len(os.listdir("/proc/self/task")):
            gc.collect()
    return result


_num_modules_frozen = 0


def _freeze() -> None:
    """
    What has been imported stays. It would be looked through for garbage whenever an engine goes or
    a worker is forked, which would take a third of the time of a test.
    """
    global _num_modules_frozen
    _num_modules_frozen = len(sys.modules)
    gc.collect()
    gc.freeze()
