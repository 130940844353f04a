"""
Finds metrics that communicate in each call and that the ranks call different numbers of times: they
would wait for `distributed.timeout`, or be reduced with the values of something else.
"""

import json
import logging
import os
import sys
import threading
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Tuple, cast

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from torch.distributed import distributed_c10d

from allennlp_deepspeed.engine.process import collectives, worker_failure
from allennlp_deepspeed.engine.process.worker_device import start_thread

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0

# Numbers of collectives that this rank has entered, by process group.
Entered = Dict[str, int]


class MetricCallMonitor:
    """
    Runs the collectives of metrics' calls in their own process group, so that none pairs with one
    of the training, and compares the order in which ranks enter them.

    A thread publishes the numbers of collectives that its rank has entered in each process group.
    If a rank has entered the n-th of metrics before the m-th of another group, and another rank in
    the other order, both wait forever. A slow rank has entered fewer in every group.

    Every rank must construct it.
    """

    def __init__(self) -> None:
        self._default_group: Any = distributed_c10d._get_default_group()
        self._group = cast(Any, dist.new_group())
        store = distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore(f"metric_calls/{self._group.group_name}", store)
        # The metric that is being called, and the number of collectives of metrics before.
        self._call: Optional[Tuple[str, int]] = None
        # The number of collectives of metrics, and of the others at least after the last of them.
        self._last: Tuple[int, Entered] = (0, self._entered_in_other_groups())
        self._problem: Optional[str] = None
        self._is_closed = threading.Event()
        self.restart_counts()
        start_thread(self._watch)

    def restart_counts(self) -> None:
        """Counts from zero again, for messages. Every rank must call it, after a collective."""
        self._counts: Counter = Counter()
        self.checksum = 0
        """A checksum of the calls, which is the same on all ranks."""

    def close(self) -> None:
        """Ends the thread. Not a collective."""
        self._is_closed.set()

    @contextmanager
    def calling(self, metric: str) -> Iterator[None]:
        """
        Context manager for a call of a metric, in which `torch.distributed` communicates in the
        group of metrics by default.

        # Raises

        `ConfigurationError`
            If ranks have called metrics different numbers of times, and a collective has failed
            therefore.
        """
        if self._call is not None:
            # A metric in a metric.
            yield
            return
        num_before = self._num_entered
        self._call = metric, num_before
        distributed_c10d._update_default_pg(self._group)
        try:
            yield
        except RuntimeError as error:
            if self._problem is None:
                raise
            raise ConfigurationError(self._problem) from error
        finally:
            distributed_c10d._update_default_pg(self._default_group)
            num_collectives = self._num_entered - num_before
            if num_collectives > 0:
                self._counts[metric] += num_collectives
                call = f"{metric} {num_collectives}".encode()
                self.checksum = zlib.crc32(call, self.checksum)
                self._last = self._num_entered, self._entered_in_other_groups()
            self._call = None

    def check(self) -> None:
        """
        Compares the order of calls on all ranks with one all-gather of objects. Every rank must
        call it.

        # Raises

        `ConfigurationError`
            If a metric was reduced with the values of another.
        """
        own = self.checksum, self._counts
        checksums, counts = zip(*collectives.all_gather_object(own))
        if len(set(checksums)) > 1:
            raise ConfigurationError(_describe(counts))

    @property
    def _num_entered(self) -> int:
        return self._group._get_sequence_number_for_group()

    def _entered_in_other_groups(self) -> Entered:
        return {
            group.group_name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            for group in list(distributed_c10d._world.pg_map)
            if group is not self._group
        }

    def _watch(self) -> None:
        published = None
        # The store ends with its process.
        with suppress(dist.DistError, RuntimeError):
            while not self._is_closed.wait(_POLL_SECONDS):
                # In this order: what was entered in other groups was entered before the next
                # collective of metrics.
                others = self._entered_in_other_groups()
                state = json.dumps([others, self._num_entered, self._counts_now()])
                if state != published:
                    self._store.set(str(dist.get_rank()), state)
                    published = state
                elif self._waits_forever():
                    self._fail()
                    return

    def _counts_now(self) -> Counter:
        counts, call = Counter(self._counts), self._call
        if call is not None:
            counts[call[0]] += self._num_entered - call[1]
        return counts

    def _states_of_other_ranks(self) -> List[Tuple[Entered, int, Dict[str, int]]]:
        ranks = set(range(dist.get_world_size())) - {dist.get_rank()}
        return [
            json.loads(self._store.get(key))
            for key in map(str, sorted(ranks))
            if self._store.check([key])
        ]

    def _waits_forever(self) -> bool:
        """Returns whether another rank has entered a collective that this rank enters later."""
        number, others = self._last
        if self._call is not None:
            number, others = self._num_entered, self._entered_in_other_groups()
        return any(
            number_there < number and any(there.get(name, 0) > others[name] for name in others)
            for there, number_there, _ in self._states_of_other_ranks()
        )

    def _fail(self) -> None:
        """Ends this process if it is a worker, because a collective can't be left."""
        own = self._counts_now()
        of_ranks = [counts for *_, counts in self._states_of_other_ranks()]
        of_ranks.insert(dist.get_rank(), own)
        self._problem = _describe(of_ranks)
        error = ConfigurationError(self._problem).with_traceback(_traceback_of_main_thread())
        if worker_failure.report(error) is not None:
            os._exit(1)
        logger.error(self._problem)


def _traceback_of_main_thread() -> Optional[TracebackType]:
    frame: Any = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    traceback = None
    while frame is not None:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return traceback


def _describe(of_ranks: Any) -> str:
    """
    Describes metrics by the numbers of their collectives on each rank.

    # Parameters

    of_ranks : `Sequence[Mapping[str, int]]`, required.
        The numbers by metric, of each rank.
    """
    names = sorted(set().union(*of_ranks))
    numbers = {name: [counts.get(name, 0) for counts in of_ranks] for name in names}
    lines = [f"{name} {_by_rank(n)}" for name, n in numbers.items() if len(set(n)) > 1]
    difference = f"the order of {', '.join(names)} differs"
    if lines:
        difference = f"there were reductions of {'; '.join(lines)}"
    return (
        "Metrics that reduce over the workers in each call must be called equally often, and in "
        "the same order, on each worker. Since the start of the epoch or validation "
        f"{difference}. List the attributes that calls add to in the metric's class, "
        "`summed_attributes = (...)`: they are then summed when metrics are read, and workers may "
        "call it as often as they like."
    )


def _by_rank(numbers: List[int]) -> str:
    ranks: Dict[int, List[str]] = {}
    for rank, number in enumerate(numbers):
        ranks.setdefault(number, []).append(str(rank))
    return ", ".join(f"{number} on rank {' and '.join(each)}" for number, each in ranks.items())
