"""Processes that meet, compare what they have, and tell each other why they fail."""

import threading
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List

import pytest
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import find_open_port

from allennlp_deepspeed.processes.activity import (
    NOT_WATCHED,
    SAVING,
    TRAINING,
    VALIDATION,
    Activity,
    Board,
)
from allennlp_deepspeed.processes.heartbeat import Heartbeat
from allennlp_deepspeed.processes.job import Failure, Job, JobFailure
from allennlp_deepspeed.processes.membership import Limits, Member

SECONDS = 30  # until a test whose threads wait for each other fails


def members(count: int, workers: int = 1, **limits: Any) -> List[Member]:
    port = find_open_port() if count > 1 else 0
    return [
        Member(
            ranks=tuple(range(i * workers, (i + 1) * workers)),
            world_size=count * workers,
            address="127.0.0.1",
            port=port,
            serves=i == 0,
            limits=Limits(**limits),
        )
        for i in range(count)
    ]


def together(members: List[Member], function: Callable[[Job], Any]) -> List[Any]:
    """What the function returns or raises for each member, in threads."""
    results: Dict[int, Any] = {}

    def run(member: Member) -> None:
        try:
            with Job(member) as job:
                results[member.index] = function(job)
        except BaseException as error:
            results[member.index] = error

    threads = [threading.Thread(target=run, args=[m], daemon=True) for m in members]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return [results[member.index] for member in members]


def test_members_know_each_other_when_they_have_met() -> None:
    def meet(job: Job) -> List[str]:
        job.meet({"seed": 1})
        return [job.name_of(rank).split()[1] for rank in range(4)]

    assert together(members(2, workers=2), meet) == [["0", "1", "2", "3"]] * 2


def test_a_difference_is_named_for_all() -> None:
    def meet(job: Job) -> None:
        job.meet({"seed": job.member.index, "stage": 2})

    for error in together(members(2), meet):
        assert isinstance(error, ConfigurationError)
        assert "'seed' is 0 on " in error.message
        assert "stage" not in error.message


def test_a_difference_that_is_known_later_is_named_for_all() -> None:
    def meet(job: Job) -> None:
        job.meet({})
        job.compare("vocabulary", {"tokens.txt": 10 + job.member.index})

    for error in together(members(2), meet):
        assert isinstance(error, ConfigurationError)
        assert "'tokens.txt' is 10 on " in error.message


def test_members_that_count_in_different_ways_are_told() -> None:
    first = members(2)[0]
    second = Member((2, 3), 4, "127.0.0.1", first.port, serves=False)
    for error in together([first, second], lambda job: job.meet({})):
        assert isinstance(error, ConfigurationError)
        assert "number of workers of the node (distributed.cuda_devices)' is " in error.message


def test_one_that_does_not_come_is_named() -> None:
    [error] = together(members(2, rendezvous_timeout=0.5)[:1], lambda job: job.meet({}))
    assert "node 1 of 2 has not come" in error.message


def test_a_launchers_members_are_ranks() -> None:
    first = replace(members(2, rendezvous_timeout=0.5)[0], launcher="srun")
    [error] = together([first], lambda job: job.meet({}))
    assert "rank 1 of 2 has not come" in error.message
    assert "that srun was to start" in error.message and "--node-rank" not in error.message


def test_one_that_goes_before_it_is_watched_is_named() -> None:
    def begin(job: Job) -> None:
        job.meet({})
        if job.member.index == 0:
            with Heartbeat(job, lambda: None):
                pass

    error, _ = together(members(2, rendezvous_timeout=1), begin)
    assert "(rank 1): heartbeat not known yet. Gone or frozen" in error.message


def test_a_failure_is_read_by_all() -> None:
    def fail(job: Job) -> None:
        job.meet({})
        if job.member.index == 1:
            raise ValueError("of the second")
        job.compare("vocabulary", {})

    first, second = together(members(2), fail)
    assert isinstance(first, JobFailure)
    assert "(rank 1) has failed: ValueError: of the second" in str(first)
    assert isinstance(second, ValueError)


def test_what_has_failed_first_is_no_consequence() -> None:
    # One that still looks for the others while the first fails, ends in `meet`.
    have_met = threading.Barrier(2, timeout=SECONDS)
    is_reported = threading.Event()

    def fail(job: Job) -> Any:
        job.meet({})
        have_met.wait()
        if job.member.index == 0:
            job.report("rank 0", "has lost rank 1", is_consequence=True)
            is_reported.set()
        elif is_reported.wait(SECONDS):
            job.report("rank 1", "has failed")
        return job.cause(seconds=10)

    with_cause = together(members(2), fail)
    assert [failure.who for failure in with_cause] == ["rank 1", "rank 1"]


class TestHeartbeat:
    """Of a member whose two workers a board stands for."""

    @pytest.fixture
    def job(self) -> Iterator[Job]:
        [member] = members(1, workers=2, watchdog=10)
        with Job(member) as job:
            job.meet({})
            yield job

    def failures(
        self, job: Job, *activities: Activity, stopped: Any = (), ticks: int = 1
    ) -> List[Failure]:
        board = Board(len(activities))
        for i, activity in enumerate(activities):
            board.write(i, activity)
        heartbeat = Heartbeat(job, on_failure=lambda: None)
        heartbeat.watch(board, lambda index: index in stopped)
        for _ in range(ticks):
            heartbeat.tick()
        return job.failures

    def test_a_rank_without_progress_is_named(self, job: Job) -> None:
        late = time.monotonic() - 11
        behind = Activity(TRAINING, 0, 4, late)
        [failure] = self.failures(job, Activity(TRAINING, 0, 5, late), behind)
        assert failure.who.startswith("rank 1 (")
        assert failure.asks_for_stacks
        assert "step 5 of epoch 0 was its last" in failure.details

    @pytest.mark.parametrize("phase", [NOT_WATCHED, SAVING])
    def test_the_others_wait_for_one_that_takes_its_time(self, job: Job, phase: float) -> None:
        late = time.monotonic() - 11
        assert not self.failures(job, Activity(TRAINING, 0, 5, late), Activity(phase, 0, 5, late))

    def test_a_rank_goes_on_in_time(self, job: Job) -> None:
        recent = Activity(VALIDATION, 0, 5, time.monotonic() - 5)
        assert not self.failures(job, recent, recent)

    def test_a_rank_that_is_stopped_is_named_whatever_it_did(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = time.monotonic()
        saving = Activity(SAVING, 0, 5, now)
        times = iter([now, now + 11])
        monkeypatch.setattr("allennlp_deepspeed.processes.heartbeat.now", lambda: next(times))
        [failure] = self.failures(job, saving, saving, stopped=[1], ticks=2)
        assert "is stopped for 10 s" in failure.what

    def test_the_others_wait_for_one_that_is_stopped(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # It is seen to be stopped some time after all have made their last step.
        start = time.monotonic()
        last = Activity(TRAINING, 0, 5, start)
        times = iter([start + 1, start + 10.5, start + 11])
        monkeypatch.setattr("allennlp_deepspeed.processes.heartbeat.now", lambda: next(times))
        [failure] = self.failures(job, last, last, stopped=[1], ticks=3)
        assert failure.who.startswith("rank 1 (")
        assert "is stopped for 10 s" in failure.what
