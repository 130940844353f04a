"""Threads of workers on the CPU don't take each other's cores."""

import os
import threading
from typing import Callable, List, Set

import pytest

from allennlp_deepspeed.engine.process_environment import process_environment
from allennlp_deepspeed.processes.scheduling import computing_undisturbed
from tests.support.side_by_side import CPU
from tests.support.workers import run_workers

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="there is no such policy")


def policies() -> Set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def with_policy(policy: int, work: Callable[[], List[Set[int]]]) -> List[Set[int]]:
    """In a process with threads of this policy."""

    def in_process(_: int) -> List[Set[int]]:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
        return work()

    return run_workers(1, in_process)[0]


def policies_around() -> List[Set[int]]:
    """Before it, within it and after it, with threads that were started before and within."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(2)]
    threads[0].start()
    found = [policies()]
    with computing_undisturbed():
        threads[1].start()
        found.append(policies())
    found.append(policies())
    end.set()
    for thread in threads:
        thread.join()
    return found


def test_all_threads_have_the_policy_until_it_is_left() -> None:
    other, batch = {os.SCHED_OTHER}, {os.SCHED_BATCH}
    assert with_policy(os.SCHED_OTHER, policies_around) == [other, batch, other]


def test_a_policy_that_somebody_has_chosen_stays() -> None:
    batch, idle = {os.SCHED_BATCH}, {os.SCHED_IDLE}
    assert with_policy(os.SCHED_BATCH, policies_around) == [batch] * 3
    assert with_policy(os.SCHED_IDLE, policies_around) == [idle] * 3


@pytest.mark.parametrize("num_here, is_entered", [(2, True), (1, False)])
def test_workers_of_one_machine_have_the_policy_while_there_is_an_engine(
    num_here: int, is_entered: bool
) -> None:
    def work(rank: int) -> bool:
        os.environ["ALLENNLP_PROCS_PER_NODE"] = str(num_here)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
        with process_environment(CPU, rank):
            return os.sched_getscheduler(0) == os.SCHED_BATCH

    assert run_workers(2, work) == [is_entered] * 2
