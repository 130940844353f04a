"""
A training as it is seen by the processes that have started its workers, on one host or on many:
they meet before data are read, tell each other why one fails, and part at the end.
"""

import json
import logging
import socket
import threading
import time
import traceback
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.processes.fingerprints import differences
from allennlp_deepspeed.processes.job_store import (
    POLL_SECONDS,
    JobStore,
    StoreServer,
    StoreUnreachable,
    Waiting,
)
from allennlp_deepspeed.processes.membership import Member

logger = logging.getLogger(__name__)

# How long the process with the store waits for the others to have read why it ends.
_LINGER_SECONDS = 5.0

# That a member has for reading failures or reporting one, in seconds.
_SECONDS_TO_TELL = 5.0

# In characters, of a traceback.
_MAX_LENGTH = 14_000


class JobFailure(RuntimeError):
    """What has failed first is on another host, or a rank or a host is stuck or gone."""


class Failure(NamedTuple):
    """
    Why a training ends, as all of its members read it.

    # Parameters

    member : `int`
        Which one says so.
    who : `str`
        The rank or the host that has failed.
    what : `str`
        In a line.
    details : `str`, optional (default = `""`)
        A traceback, for example.
    is_consequence : `bool`, optional (default = `False`)
        Whether it looks as if something had failed elsewhere before.
    asks_for_stacks : `bool`, optional (default = `False`)
        Whether all members are to print where their workers are.
    """

    member: int
    who: str
    what: str
    details: str = ""
    is_consequence: bool = False
    asks_for_stacks: bool = False

    def __str__(self) -> str:
        return "\n".join(filter(None, [f"{self.who} {self.what}", self.details]))


class Attendant(NamedTuple):
    """What a member says of itself when it comes."""

    host: str
    ranks: List[int]
    world_size: int

    @property
    def name(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        which = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"{self.host} ({which})"


class Job:
    """
    A training that this process takes part in. A context, within which `meet` finds the others, and
    at whose end they are told if it ends by an exception.

    # Parameters

    member : `Member`, required.
        This process.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.attendants: List[Attendant] = []
        """All members, by index, from `meet` on."""
        self.failures: List[Failure] = []
        """Those of all members that are known here, in the order in which they were reported."""
        self._store: Optional[JobStore] = None
        self._server: Optional[StoreServer] = None
        self._num_read = 0
        self._reported: Optional[Failure] = None
        self._is_finished = False
        self._lock = threading.RLock()

    @property
    def own(self) -> Attendant:
        """This member."""
        return Attendant(socket.gethostname(), list(self.member.ranks), self.member.world_size)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other member."""
        return self.member.num_members == 1

    @property
    def store(self) -> JobStore:
        """From `meet` on."""
        assert self._store is not None, "call `meet` first"
        return self._store

    def name_of(self, rank: int) -> str:
        """Of a rank and its host, as it is called in messages."""
        attendant = self.attendants[rank // len(self.member.ranks)]
        return f"rank {rank} ({attendant.host})"

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback_: Optional[TracebackType],
    ) -> None:
        if error is not None and not isinstance(error, JobFailure):
            self.report(
                self.own.name,
                f"has failed: {type(error).__name__}: {error}".partition("\n")[0],
                "".join(traceback.format_exception(error)),
            )
        self._leave()

    def meet(self, fingerprint: Dict[str, Any]) -> None:
        """
        Waits for all members.

        # Parameters

        fingerprint : `Dict[str, Any]`, required.
            What has to be the same for all, as JSON, by what it is called.

        # Raises

        `ConfigurationError`
            For every member that is there, if they differ, if some don't come within
            `rendezvous_timeout` or don't find the store, or if two say that they are the same.
        `JobFailure`
            If another one has failed.
        """
        deadline = time.monotonic() + self.member.limits.rendezvous_timeout
        if self.member.serves:
            self._serve()
        store = JobStore(self.member.address, self.member.port, self.member.attempt)
        if not self.is_alone:
            logger.info("%s is to meet the others at %s", self.own.name, store.where)
        self._connect(store, deadline)
        self._register(store)
        self._store = store
        said = {"attendant": self.own._asdict(), "fingerprint": fingerprint}
        everyones = self._gather("members", said, deadline)
        self.attendants = [Attendant(**said["attendant"]) for said in everyones]
        self._check([said["fingerprint"] for said in everyones])

    def compare(self, name: str, fingerprint: Dict[str, Any]) -> None:
        """
        Compares what is known later. To be called by every member, once for each `name`. Waits for
        the slowest.

        # Raises

        `ConfigurationError`
            For every member, if they differ.
        `JobFailure`
            If another one has failed.
        """
        if not self.is_alone:
            self._check(self._gather(name, fingerprint, deadline=float("inf")))

    def gather(self, name: str, value: Any, waits: bool = False) -> List[Any]:
        """
        To be called by every member, once for each `name`.

        # Parameters

        name : `str`, required.
            What is gathered.
        value : `Any`, required.
            This member's, as JSON.
        waits : `bool`, optional (default = `False`)
            Whether there is no limit, because members do something before that takes long.

        # Returns

        `List[Any]`
            The values of all members, by index.

        # Raises

        `ConfigurationError`
            If others don't come within `rendezvous_timeout`.
        `JobFailure`
            If another one has failed.
        """
        limit = float("inf") if waits else self.member.limits.rendezvous_timeout
        return self._gather(name, value, time.monotonic() + limit)

    def report(
        self, who: str, what: str, details: str = "", *, is_consequence: bool = False, **flags: bool
    ) -> None:
        """
        Tells all members why this one ends, with the fields of a `Failure`. Only the first time,
        and the first time that it isn't a consequence, and not after `finish`.
        """
        with self._lock:
            said = self._reported
            is_known = said is not None and (is_consequence or not said.is_consequence)
            if is_known or self._is_finished or self._store is None:
                return
            details = details[-_MAX_LENGTH:]
            failure = Failure(self.member.index, who, what, details, is_consequence, **flags)
            self._reported = failure
            try:
                number = self._store.add("failures", 1, _SECONDS_TO_TELL)
                text = json.dumps(failure._asdict()).encode()
                self._store.set(f"failure/{number}", text, _SECONDS_TO_TELL)
            except StoreUnreachable:
                self.failures.append(failure)

    def finish(self) -> None:
        """From here on this member has nothing to say. For when its workers have ended."""
        self._is_finished = True

    def look(self, seconds: float = _SECONDS_TO_TELL) -> List[Failure]:
        """
        Reads what has been reported since.

        # Returns

        `List[Failure]`
            All that is known.

        # Raises

        `StoreUnreachable`
        """
        with self._lock:
            while self._store is not None:
                text = self._store.get(f"failure/{self._num_read + 1}", seconds)
                if text is None:
                    break
                self._num_read += 1
                self.failures.append(Failure(**json.loads(text)))
            return self.failures

    def cause(self, seconds: float) -> Optional[Failure]:
        """
        What has failed first among all members, `None` if nothing has.

        # Parameters

        seconds : `float`, required.
            To wait for it, as long as only consequences are known.
        """
        deadline = time.monotonic() + seconds
        while True:
            with suppress(StoreUnreachable):
                self.look()
            causes = [failure for failure in self.failures if not failure.is_consequence]
            if causes or not self.failures or time.monotonic() > deadline:
                return next(iter(causes or self.failures), None)
            time.sleep(POLL_SECONDS)

    def raise_failures(self) -> None:
        """
        # Raises

        `JobFailure`
            If a failure of any member is known.
        """
        if self.failures:
            cause = self.cause(seconds=0)
            raise JobFailure(str(cause))

    def _serve(self) -> None:
        # What one host is enough for, no other has to see.
        self._server = StoreServer(self.member.port, self.member.attempt, is_local=self.is_alone)
        self.member = self.member.at_port(self._server.port)

    def _connect(self, store: JobStore, deadline: float) -> None:
        try:
            store.connect(deadline)
        except StoreUnreachable as error:
            advice = (
                f"Start {self.member.unit} 0 there, with the same port, write the address at which "
                "the other nodes reach it, and have firewalls let them through."
            )
            if self.member.serves:
                advice = "It has to be an address of this host, at which all nodes reach it."
            raise ConfigurationError(
                f"'distributed.primary_address' and 'primary_port' are {store.where}, where "
                f"{self.own.name} has found nothing for {self.member.limits.rendezvous_timeout:g} s"
                f" ('distributed.rendezvous_timeout'): {error}. {advice}"
            ) from error
        if self._server is not None:
            # Through the address that the others take, which may lead to another host.
            token = uuid.uuid4().hex.encode()
            self._server.put("token", token)
            if store.get("token") != token:
                unit = self.member.unit
                raise ConfigurationError(
                    f"{self.own.host} has been started as {unit} 0, but at {store.where}, which is "
                    "'distributed.primary_address' and 'primary_port', there is another one. "
                    f"{self.member.how_to_count}, and {unit} 0 has to be at that address."
                )

    def _register(self, store: JobStore) -> None:
        index = self.member.index
        if store.add(f"comers/{index}", 1) == 1:
            return
        text = store.get(f"members/{index}")
        other = json.loads(text)["attendant"]["host"] if text else "another process"
        raise ConfigurationError(
            f"{self.own.host} has been started as {self.own.name} of the training at "
            f"{store.where}, and so has {other}. {self.member.how_to_count}."
        )

    def _gather(self, name: str, value: Any, deadline: float) -> List[Any]:
        """The values of all members."""
        try:
            return self._wait_for_values(name, value, deadline)
        except StoreUnreachable as error:
            self.raise_failures()
            first = f"{self.member.unit.capitalize()} 0"
            raise JobFailure(f"{first} {self.lost_store(error)}") from error

    def lost_store(self, error: StoreUnreachable) -> str:
        """What is said when the store of the training isn't reached any more."""
        return (
            f"has the store of the training at {self.store.where}, which {self.own.name} doesn't "
            f"reach any more: {error}"
        )

    def _wait_for_values(self, name: str, value: Any, deadline: float) -> List[Any]:
        self.store.set(f"{name}/{self.member.index}", json.dumps(value).encode())
        come: Dict[int, Any] = {}
        waiting = Waiting()
        while True:
            # One that fails because of the values has written its own before, so they are read
            # once more when it is known that one has failed.
            has_failed = bool(self.failures)
            for index in range(self.member.num_members):
                text = None if index in come else self.store.get(f"{name}/{index}")
                if text is not None:
                    come[index] = json.loads(text)
            if name == "members":
                _check_sizes([Attendant(**said["attendant"]) for said in come.values()])
            if len(come) == self.member.num_members:
                return [come[index] for index in sorted(come)]
            if has_failed:
                self.raise_failures()
            if self.look():
                continue
            if time.monotonic() > deadline:
                advice = "Gone or frozen, or the network between the hosts is."
                raise ConfigurationError(
                    f"Within {self.member.limits.rendezvous_timeout:g} s "
                    f"('distributed.rendezvous_timeout') {self._who_is_missing(name, come)} "
                    f"{advice if self.attendants else self.member.how_to_start}"
                )
            waiting.say(self._who_is_missing(name, come))
            time.sleep(POLL_SECONDS)

    def _who_is_missing(self, name: str, come: Dict[int, Any]) -> str:
        indices = range(self.member.num_members)
        missing = [str(i) for i in indices if i not in come]
        if self.attendants:
            missing = [self.attendants[int(i)].name for i in missing]
            return f"{', '.join(missing)}: {name} not known yet."
        here = [Attendant(**come[i]["attendant"]).name for i in sorted(come)]
        plural, have = ("s", "have") if len(missing) > 1 else ("", "has")
        return (
            f"{self.member.unit}{plural} {', '.join(missing)} of {len(indices)} {have} not come; "
            f"here: {', '.join(here)}."
        )

    def _check(self, fingerprints: Sequence[Dict[str, Any]]) -> None:
        names = [attendant.name for attendant in self.attendants]
        lines = differences(list(zip(names, fingerprints)))
        if lines:
            raise ConfigurationError(
                "\n".join(["What has to be the same on every node isn't:", *lines])
            )

    def _leave(self) -> None:
        self.finish()
        if self._store is not None:
            with suppress(StoreUnreachable):
                self._store.set(f"left/{self.member.index}", b"yes", _SECONDS_TO_TELL)
                if self._server is not None:
                    self._wait_for_leavers(self._store)
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _wait_for_leavers(self, store: JobStore) -> None:
        """Those that have come. They may still have to read why this one ends."""
        deadline = time.monotonic() + _LINGER_SECONDS
        for index in range(self.member.num_members):
            while store.get(f"members/{index}") and not store.get(f"left/{index}"):
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_SECONDS)


def _check_sizes(attendants: List[Attendant]) -> None:
    sizes: List[Tuple[str, Dict[str, Any]]] = [
        (
            attendant.name,
            {
                "number of workers of the node (distributed.cuda_devices)": len(attendant.ranks),
                "number of workers of all nodes (distributed.num_nodes)": attendant.world_size,
            },
        )
        for attendant in attendants
    ]
    lines = differences(sizes)
    if lines:
        raise ConfigurationError("\n".join(["The nodes count in different ways:", *lines]))
