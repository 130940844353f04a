"""
Trainings on two hosts, of which one has a fault at a moment drawn at random. What is expected of
each: that it ends everywhere in time or goes on, and that it comes to the weights and metrics of a
training without a fault, bit for bit.
"""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence

import psutil

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from tests.faults.trial import differences
from tests.support.command import Command, Run, wait_for_all
from tests.support.experiment import Config, Result, deepspeed, load_config
from tests.support.hosts import Hosts, write_config

# Seconds, in the config of every trial.
TIMEOUT = 12
RENDEZVOUS_TIMEOUT = 15

# For who is left to leave and to be ended.
SECONDS_TO_END = 30

# Until a node that doesn't reach node 0 ends.
SECONDS_WITHOUT_STORE = 65

# For a training that nothing ends, on hosts that others use too.
TIME_LIMIT = 150

DISK_BYTES = 64 * 2**20

NUM_EPOCHS, STEPS_IN_EPOCH = 3, 4

# Seconds after each step, and from the start of the commands in which a fault comes: together they
# take longer to train.
PAUSE = 0.1
SECONDS_OF_START = 2.0

# Everything whose state has to be restored for a run to go on as if it had never stopped: shuffled
# data, dropout, accumulation, a schedule, a moving average.
_EXPERIMENT = {
    "model.encoder.num_layers": 2,
    "model.encoder.dropout": 0.3,
    "data_loader.batch_size": 3,
    "trainer.num_epochs": NUM_EPOCHS,
    "trainer.num_gradient_accumulation_steps": 2,
    "trainer.learning_rate_scheduler": {"type": "slanted_triangular"},
    "trainer.moving_average": {"decay": 0.9},
    "trainer.callbacks": [{"type": "tell_steps", "pause": PAUSE}],
}
_CHECKPOINTS = {"save_every_num_batches": 2, "keep_most_recent_by_count": 2}

KINDS = (
    "kill",
    "kill, and another while it recovers",
    "cut",
    "cut for a while",
    "freeze",
    "freeze a rank",
    "freeze for a while",
    "come late",
    "come too late",
    "full disk",
)
GO_ON = ("cut for a while", "freeze for a while", "come late")


class Moment(NamedTuple):
    """
    # Parameters

    step : `Optional[str]`
        As it is printed when it has been made. `None` for the start of the commands.
    seconds : `float`
        After that.
    """

    step: Optional[str]
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s after {self.step or 'the start'}"

    def wait(self, commands: Sequence[Command]) -> None:
        for command in commands:
            # Signals go to its processes by their session, which it begins with.
            while command.is_running and os.getsid(command.pid) != command.pid:
                time.sleep(0.01)
        if self.step is not None:
            commands[0].wait_until_it_prints(self.step, TIME_LIMIT)
        time.sleep(self.seconds)


class Fault(NamedTuple):
    """
    # Parameters

    kind : `str`
        One of `KINDS`.
    node : `int`
        That has it.
    moment : `Moment`
    seconds : `float`
        That it lasts, if it passes. How late a node comes.
    second : `Optional[Fault]`
        In the run that recovers from this one.
    """

    kind: str
    node: int
    moment: Moment
    seconds: float = 0.0
    second: Optional["Fault"] = None

    def __str__(self) -> str:
        for_seconds = f" ({self.seconds:.1f} s)" if self.seconds else ""
        when = "" if self.kind.startswith("come") else f" {self.moment}"
        second = f", then {self.second}" if self.second is not None else ""
        return f"{self.kind}{for_seconds}: node {self.node}{when}{second}"


def draw(generator: random.Random, kind: str) -> Fault:
    node = generator.choice([0, 1])
    moment = _draw_moment(
        generator,
        can_be_start=kind not in ("freeze a rank", "full disk"),
        can_be_end=kind == "kill",
    )
    if kind == "kill, and another while it recovers":
        at_start = Moment(None, generator.uniform(0, SECONDS_OF_START))
        second = Fault("kill", generator.choice([0, 1]), at_start)
        return Fault(kind, node, moment, second=second)
    seconds = 0.0
    if kind in ("cut for a while", "freeze for a while"):
        seconds = generator.uniform(0.5, TIMEOUT / 3)
    elif kind == "come late":
        seconds = generator.uniform(1, RENDEZVOUS_TIMEOUT - 4)
    elif kind == "come too late":
        seconds = generator.uniform(1, 5)
    return Fault(kind, node, moment, seconds)


def _draw_moment(generator: random.Random, can_be_start: bool, can_be_end: bool) -> Moment:
    if can_be_start and generator.random() < 0.3:
        return Moment(None, generator.uniform(0, SECONDS_OF_START))
    if can_be_end and generator.random() < 0.5:
        # In the validation, the last commit or the archiving.
        return Moment(f"step {STEPS_IN_EPOCH} of epoch {NUM_EPOCHS - 1}", generator.uniform(0, 1.5))
    # Not one of the last, after which there may be nothing left for which all need one another.
    number = generator.randrange(1, NUM_EPOCHS * STEPS_IN_EPOCH - 3)
    epoch, step = divmod(number, STEPS_IN_EPOCH)
    return Moment(f"step {step + 1} of epoch {epoch}", generator.uniform(0, 0.3))


class Trial(NamedTuple):
    """
    # Parameters

    stage : `int`
        Of ZeRO.
    is_shared : `bool`
        Whether the hosts have one serialization directory.
    saves_in_background : `bool`
    has_flag : `bool`
        Whether it is continued by `--recover`, and not by `"resume": "auto"`.
    fault : `Fault`
    """

    stage: int
    is_shared: bool
    saves_in_background: bool
    has_flag: bool
    fault: Fault

    def __str__(self) -> str:
        directories = "shared directory" if self.is_shared else "own directories"
        background = ", async_save" if self.saves_in_background else ""
        how = "--recover" if self.has_flag else "resume"
        return f"stage {self.stage}, {directories}{background}, {how}; {self.fault}"


class Outcome(NamedTuple):
    """
    # Parameters

    seconds : `List[float]`
        From each fault that ends a training until no process of it was left.
    limits : `List[float]`
        What they must not be more than.
    problems : `List[str]`
    """

    seconds: List[float]
    limits: List[float]
    problems: List[str]


def experiment(stage: int) -> Config:
    """Without "distributed"."""
    return deepspeed(
        load_config("tagger", {**_EXPERIMENT, "trainer.checkpointer": _CHECKPOINTS}), stage
    )


def run_trial(trial: Trial, expected: Result, directory: Path) -> Outcome:
    """
    # Parameters

    trial : `Trial`
    expected : `Result`
        Of the same experiment on one host.
    directory : `Path`
        Empty.
    """
    return _Run(trial, expected, directory).run()


class _Run:
    def __init__(self, trial: Trial, expected: Result, directory: Path) -> None:
        self._trial = trial
        self._expected = expected
        names = ["shared"] * 2 if trial.is_shared else ["of-host-0", "of-host-1"]
        disks = [directory / name for name in names]
        self._directories = [disk / "out" for disk in disks]
        self._outcome = Outcome([], [], [])
        for path in disks:
            path.mkdir(exist_ok=True)
        is_limited = trial.fault.kind == "full disk"
        disk = disks[trial.fault.node]
        self._hosts = Hosts(2, directory, {disk: DISK_BYTES} if is_limited else {})
        self._ballast = self._hosts.seen(disk) / "ballast"
        config = experiment(trial.stage)
        config["distributed"] = {
            **self._hosts.distributed(),
            "timeout": TIMEOUT,
            "rendezvous_timeout": RENDEZVOUS_TIMEOUT,
        }
        config["trainer"]["checkpointer"]["async_save"] = trial.saves_in_background
        if not trial.has_flag:
            config["trainer"]["resume"] = "auto"
        self._config = write_config(config, directory / "config")
        # How this process sees what the hosts have.
        self._seen = [self._hosts.seen(path) for path in self._directories]

    def run(self) -> Outcome:
        fault: Optional[Fault] = self._trial.fault
        try:
            while fault is not None:
                is_over = self._run_with(fault)
                fault = None if is_over else fault.second
            if not is_over:
                self._recover()
            self._compare()
        finally:
            self._hosts.remove()
        return self._outcome

    def _start(self, node: int) -> Command:
        recovers = self._trial.has_flag and self._has_checkpoint()
        flags = ["--recover"] if recovers else []
        return self._hosts[node].train(self._config, self._directories[node], *flags)

    def _start_both(self) -> List[Command]:
        if self._trial.has_flag and not self._has_checkpoint():
            # There is nothing to recover from, and `allennlp train` begins with no directory.
            for directory in self._seen:
                shutil.rmtree(directory, ignore_errors=True)
        return [self._start(node) for node in (0, 1)]

    def _run_with(self, fault: Fault) -> bool:
        """Whether the training has come to its end."""
        if fault.kind in ("come late", "come too late"):
            return self._run_late(fault)
        commands = self._start_both()
        fault.moment.wait(commands)
        act: Callable[[Fault, List[Command]], None] = getattr(
            self, "_" + fault.kind.partition(",")[0].replace(" ", "_")
        )
        start = time.monotonic()
        act(fault, commands)
        if fault.kind in GO_ON:
            return self._check_goes_on(commands)
        limit = TIMEOUT + SECONDS_TO_END
        if fault.kind in ("cut", "freeze"):
            limit = SECONDS_WITHOUT_STORE + SECONDS_TO_END
        elif fault.moment.step is None:
            limit = max(TIMEOUT, RENDEZVOUS_TIMEOUT) + SECONDS_TO_END
        others = commands
        if fault.kind == "freeze":
            others = [commands[1 - fault.node]]
        runs = self._wait(others, start, limit, fault)
        if fault.kind == "freeze":
            # A host that goes on finds itself alone.
            commands[fault.node].signal(signal.SIGCONT)
            start = time.monotonic()
            runs += self._wait([commands[fault.node]], start, limit, fault)
        if fault.kind == "cut":
            self._hosts[fault.node].join_link()
        if fault.kind == "full disk":
            self._ballast.unlink()
            if not any("No space left on device" in run.output for run in runs):
                self._problem("It isn't said that the disk is full", runs)
        self._check_failed(fault, runs)
        return False

    def _run_late(self, fault: Fault) -> bool:
        is_too_late = fault.kind == "come too late"
        first = 1 - fault.node
        start = time.monotonic()
        commands = [self._start(first)]
        if not is_too_late:
            time.sleep(fault.seconds)
            commands.append(self._start(fault.node))
            return self._check_goes_on(commands)
        limit = RENDEZVOUS_TIMEOUT + SECONDS_TO_END
        runs = self._wait(commands, start, limit, fault)
        time.sleep(fault.seconds)
        start = time.monotonic()
        runs += self._wait([self._start(fault.node)], start, limit, fault)
        for run in runs:
            if "rendezvous_timeout" not in run.output:
                self._problem("It isn't said who is missing", [run])
        self._check_failed(fault, runs)
        return False

    def _kill(self, fault: Fault, commands: List[Command]) -> None:
        commands[fault.node].signal(signal.SIGKILL)

    def _cut(self, fault: Fault, commands: List[Command]) -> None:
        self._hosts[fault.node].cut_link()

    def _cut_for_a_while(self, fault: Fault, commands: List[Command]) -> None:
        self._hosts[fault.node].cut_link()
        time.sleep(fault.seconds)
        self._hosts[fault.node].join_link()

    def _freeze(self, fault: Fault, commands: List[Command]) -> None:
        commands[fault.node].signal(signal.SIGSTOP)

    def _freeze_for_a_while(self, fault: Fault, commands: List[Command]) -> None:
        commands[fault.node].signal(signal.SIGSTOP)
        time.sleep(fault.seconds)
        commands[fault.node].signal(signal.SIGCONT)

    def _freeze_a_rank(self, fault: Fault, commands: List[Command]) -> None:
        workers = psutil.Process(commands[fault.node].pid).children()
        os.kill(max(worker.pid for worker in workers), signal.SIGSTOP)

    def _full_disk(self, fault: Fault, commands: List[Command]) -> None:
        self._fill()

    def _fill(self) -> None:
        """To the last byte."""
        block = bytes(2**16)
        with suppress(OSError), open(self._ballast, "ab", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError:
                    block = block[: len(block) // 2]

    def _wait(self, commands: List[Command], start: float, limit: float, fault: Fault) -> List[Run]:
        deadline = start + limit
        while any(command.is_running for command in commands) and time.monotonic() < deadline:
            if fault.kind == "full disk":
                # What is removed makes no room.
                self._fill()
            time.sleep(0.05)
        runs = wait_for_all(commands, max(0.0, deadline - time.monotonic()))
        self._outcome.seconds.append(time.monotonic() - start)
        self._outcome.limits.append(limit)
        for run in runs:
            if run.timed_out:
                self._problem(f"It is still there after {limit} s", [run])
            elif run.processes:
                self._problem(f"It has left {run.processes}", [run])
        return runs

    def _check_failed(self, fault: Fault, runs: List[Run]) -> None:
        if all(run.returncode == 0 for run in runs) and fault.kind != "kill":
            self._problem("The training didn't end", runs)
        self._check_checkpoints()

    def _check_goes_on(self, commands: List[Command]) -> bool:
        runs = wait_for_all(commands, TIME_LIMIT)
        for run in runs:
            if run.returncode != 0 or run.timed_out or run.processes:
                self._problem("It didn't go on", [run])
        return all(run.returncode == 0 for run in runs)

    def _recover(self) -> None:
        for run in wait_for_all(self._start_both(), TIME_LIMIT):
            if run.returncode != 0 or run.timed_out or run.processes:
                self._problem("It could not be recovered", [run])

    def _has_checkpoint(self) -> bool:
        return any(
            CheckpointDirectory(str(directory)).list_checkpoints() for directory in self._seen
        )

    def _committed(self) -> List[str]:
        """The names of checkpoints that all directories have."""
        names = []
        for directory in self._seen:
            checkpoints = CheckpointDirectory(str(directory))
            names.append(
                {os.path.basename(checkpoints.path(p)) for p in checkpoints.list_checkpoints()}
            )
        return sorted(set.intersection(*names))

    def _check_checkpoints(self) -> None:
        """Each that all directories have has to be whole."""
        for name in self._committed():
            paths = [str(directory / name) for directory in self._seen]
            try:
                records = [CommitRecord.read(path) for path in paths]
            except CheckpointError as error:
                self._problem(f"{name} can't be read: {error}", [])
                continue
            for record, path in zip(records, paths, strict=True):
                for problem in record.problems(path):
                    self._problem(f"{name} is damaged: {problem}", [])
            all_ranks = range(records[0].world_size)
            ranks = {rank for record in records for rank in record.ranks or all_ranks}
            if ranks != set(all_ranks) or len({record.id for record in records}) > 1:
                self._problem(f"{name} is not whole: it has the files of ranks {ranks}", [])

    def _compare(self) -> None:
        for directory in dict.fromkeys(self._seen):
            if Result(directory).archive.exists():
                problems = differences(Result(directory), self._expected)
            else:
                problems = ["has no model.tar.gz"]
            self._outcome.problems.extend(f"{directory.parent.name}: {p}" for p in problems)
        self._check_checkpoints()

    def _problem(self, what: str, runs: Sequence[Run]) -> None:
        outputs = [run.output[-6000:] for run in runs]
        self._outcome.problems.append("\n".join([what, *outputs]))
