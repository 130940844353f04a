"""
Watches the members of a training and its ranks: one that is gone, can't be reached any more or
doesn't go on ends the training on all of them.
"""

import json
import logging
import threading
import time
from types import TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Type

from allennlp_deepspeed.processes.activity import Activity, Board
from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.processes.job_store import StoreUnreachable

logger = logging.getLogger(__name__)

now = time.monotonic

_MAX_SILENCE_SECONDS = 60.0

# With more members each is asked less often, so that the store has as many requests in a second.
_MEMBERS_PER_SECOND = 16


class _Seen(NamedTuple):
    """The last news of a rank."""

    activity: Activity
    age: float
    """In seconds on its own host, from its last progress to its report."""
    is_stopped: bool


class Heartbeat:
    """
    A context in which a thread of this process tells the other members that it is there and how far
    its workers are, and watches those of all.

    # Parameters

    job : `Job`, required.
        After `meet`.
    on_failure : `Callable[[], None]`, required.
        Called once, by that thread, when there is a failure of any member in `job.failures`.
    """

    def __init__(self, job: Job, on_failure: Callable[[], None]) -> None:
        self._job = job
        self._on_failure = on_failure
        self._watchdog = job.member.limits.watchdog
        members = job.member.num_members
        self._interval = max(1.0, members / _MEMBERS_PER_SECOND)
        self._silence = float("inf")
        if self._watchdog is not None:
            self._interval = min(self._interval, max(0.2, self._watchdog / 5))
            self._silence = max(min(self._watchdog, _MAX_SILENCE_SECONDS), 3 * self._interval)
        self._board: Optional[Board] = None
        self._is_stopped: Callable[[int], bool] = lambda index: False
        self._count = 0
        self._counts: Dict[int, int] = {}
        self._quiet_beats: Dict[int, int] = dict.fromkeys(range(members), 0)
        self._stopped_since: Dict[int, float] = {}
        self._done: List[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if not self._job.is_alone:
            self._beat()
            # Not for longer than others may take: nobody is watched yet.
            self._job.gather("heartbeat", None)
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._end.set()
        self._thread.join(2 * self._interval)

    def watch(self, board: Board, is_stopped: Callable[[int], bool]) -> None:
        """
        From here on the workers are watched.

        # Parameters

        board : `Board`, required.
            What they are doing, by local rank.
        is_stopped : `Callable[[int], bool]`, required.
            Whether the process of a worker has been stopped by a signal.
        """
        self._is_stopped = is_stopped
        self._board = board

    def finish(self) -> None:
        """The workers have ended, as they should."""
        self._end.set()
        self._thread.join(2 * self._interval)
        self._board = None
        if not self._job.is_alone:
            try:
                self._beat(is_done=True)
            except StoreUnreachable:
                logger.info("The store of the training has gone before this node has finished.")

    def quiet_members(self) -> List[str]:
        """Those of whom there is no news for two beats or more."""
        return [
            self._job.attendants[index].name
            for index, beats in self._quiet_beats.items()
            if beats >= 3 and index not in self._done and index != self._job.member.index
        ]

    def _run(self) -> None:
        has_said_so = False
        while not self._end.wait(self._interval):
            self.tick()
            if self._job.failures and not has_said_so:
                self._on_failure()
                has_said_so = True

    def tick(self) -> None:
        """Tells, reads and judges, once. What it finds is in `job.failures`."""
        try:
            ranks = self._exchange()
            # After a failure too, to know whom it has left.
            if not self._job.look(self._silence):
                self._judge(ranks)
                self._job.look(self._silence)
        except StoreUnreachable as error:
            self._lose(error)

    def _exchange(self) -> Dict[int, _Seen]:
        """Tells the others, and reads what they tell. By rank."""
        if self._job.is_alone:
            return dict(zip(self._job.member.ranks, self._own_ranks()))
        self._beat()
        keys = [f"beat/{index}" for index in range(self._job.member.num_members)]
        ranks: Dict[int, _Seen] = {}
        for index, text in enumerate(self._job.store.get_all(keys, self._silence)):
            beat = json.loads(text)
            if beat["is_done"] and index not in self._done:
                self._done.append(index)
            is_new = self._counts.get(index) != beat["count"]
            self._quiet_beats[index] = 0 if is_new else self._quiet_beats[index] + 1
            self._counts[index] = beat["count"]
            for rank, (activity, age, is_stopped) in zip(
                self._job.attendants[index].ranks, beat["ranks"]
            ):
                ranks[rank] = _Seen(Activity(*activity), age, is_stopped)
        return ranks

    def _beat(self, is_done: bool = False) -> None:
        self._count += 1
        beat: Dict[str, Any] = {
            "count": self._count,
            "is_done": is_done,
            "ranks": self._own_ranks(),
        }
        text = json.dumps(beat).encode()
        self._job.store.set(f"beat/{self._job.member.index}", text, self._silence)

    def _own_ranks(self) -> List[_Seen]:
        board, time_now = self._board, now()
        ranks = []
        for index in range(0 if board is None else len(board)):
            activity = board.read(index)  # type: ignore[union-attr]
            is_stopped = self._is_stopped(index)
            if is_stopped:
                self._stopped_since.setdefault(index, time_now)
            else:
                self._stopped_since.pop(index, None)
            since = self._stopped_since.get(index, activity.time)
            ranks.append(_Seen(activity, time_now - since, is_stopped))
        return ranks

    def _judge(self, ranks: Dict[int, _Seen]) -> None:
        for index, beats in self._quiet_beats.items():
            if index not in self._done and beats * self._interval >= self._silence:
                self._job.report(
                    self._job.attendants[index].name,
                    f"hasn't been heard of for {self._silence:.0f} s: it is frozen or gone, or the "
                    "network between the hosts is.",
                    self._states(ranks),
                    asks_for_stacks=True,
                )
                return
        self._judge_steps(ranks)

    def _judge_steps(self, ranks: Dict[int, _Seen]) -> None:
        watchdog = self._watchdog
        if watchdog is None:
            return
        # The others wait for one that is stopped, from before it was seen to be. While one of them
        # reads data or saves, they wait for that.
        stuck = [rank for rank, seen in ranks.items() if seen.is_stopped]
        if not stuck and all(seen.activity.is_watched for seen in ranks.values()):
            stuck = list(ranks)
        stuck = [rank for rank in stuck if ranks[rank].age >= watchdog]
        if not stuck:
            return
        # The one that is behind, for which the others wait.
        first = min(stuck, key=lambda rank: ranks[rank].activity[1:])
        how = "is stopped" if ranks[first].is_stopped else "has made no step"
        self._job.report(
            self._job.name_of(first),
            f"{how} for {watchdog:g} s ('distributed.watchdog').",
            self._states(ranks),
            asks_for_stacks=True,
        )

    def _states(self, ranks: Dict[int, _Seen]) -> str:
        return "\n".join(
            f"  {self._job.name_of(rank)} {seen.activity}; {seen.age:.0f} s ago"
            + (", stopped by a signal" if seen.is_stopped else "")
            for rank, seen in sorted(ranks.items())
        )

    def _lose(self, error: StoreUnreachable) -> None:
        """The store is gone, and whoever has it."""
        has_cause = any(not failure.is_consequence for failure in self._job.failures)
        is_expected = has_cause or 0 in self._done or self._end.is_set()
        self._end.set()
        if is_expected:
            return
        self._job.report(
            self._job.attendants[0].name,
            self._job.lost_store(error),
            asks_for_stacks=True,
        )
