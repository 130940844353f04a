"""
Completes checkpoints while training goes on.
"""

import itertools
import json
import logging
import os
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch.distributed as dist

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CommitRecord, FileRecord, file_names

logger = logging.getLogger(__name__)

_POLLING_INTERVAL = 0.02  # seconds

# Of all commits of this process: the store keeps the keys of earlier ones.
_numbers = itertools.count()


class BackgroundCommit:
    """
    Writes to disk what the ranks have saved, and commits it when all ranks have confirmed that they
    are done. A thread does so, because flushing and reading the files for their checksums takes
    longer than saving them. The ranks confirm through the process group's key-value store, which
    takes no collective.

    # Parameters

    directory : `CheckpointDirectory`, required.
    rank : `int`, required.
    directories : `Sequence[Sequence[int]]`, required.
        The ranks that share a directory, for each one. The first rank of each commits there what
        they have written, when all directories are prepared (a two-phase commit).
    hosts : `Sequence[str]`, required.
        By rank.
    timeout : `float`, required.
        The seconds after which a rank that has not confirmed is taken to be gone.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        rank: int,
        directories: Sequence[Sequence[int]],
        hosts: Sequence[str],
        timeout: float,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._directories = directories
        self._hosts = hosts
        self._timeout = timeout
        self._store = dist.distributed_c10d._get_default_store()
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None

    def start(
        self,
        point: PointInTime,
        record: CommitRecord,
        write: Callable[[], List[str]],
        then: Callable[[], None],
    ) -> None:
        """
        Starts the commit of one checkpoint. To be called by every rank, after `wait`.

        # Parameters

        point : `PointInTime`, required.
        record : `CommitRecord`, required.
            Without its files.
        write : `Callable[[], List[str]]`, required.
            Writes what this rank has not written yet, and returns the paths of all its files.
        then : `Callable[[], None]`, required.
            Called by the rank that commits, after the checkpoint has been committed in the
            directories of all ranks. A failure of the file system in it is only logged.
        """
        self._thread = threading.Thread(
            target=self._run,
            args=(f"allennlp_deepspeed/checkpoint_{next(_numbers)}", point, record, write, then),
            name="checkpoint",
            daemon=True,  # a rank that waits for one that is gone must be able to exit
        )
        self._thread.start()

    def wait(self, timeout: Optional[float] = None) -> None:
        """
        Waits until this rank has confirmed, and the rank that commits until it has committed. Not a
        collective.

        # Parameters

        timeout : `float`, optional (default = `None`)
            In seconds. What is not done then is given up silently.

        # Raises

        `BaseException`
            Whatever has happened in the thread.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        self.raise_error()

    def raise_error(self) -> None:
        """Raises what has happened in the thread, if anything has. Doesn't wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, key: str, *args: Any) -> None:
        try:
            self._commit(key, *args)
        except BaseException as error:
            self._error = error
            # Whatever others may still wait for. If the store is gone, so are they.
            with suppress(dist.DistError):
                for name in ("files", "prepared", "committed"):
                    self._tell(key, name, {"error": traceback.format_exc()})

    def _commit(
        self,
        key: str,
        point: PointInTime,
        record: CommitRecord,
        write: Callable[[], List[str]],
        then: Callable[[], None],
    ) -> None:
        unfinished = self._directory.unfinished_path(point)
        own_files = {os.path.relpath(path, unfinished): _flush(path) for path in write()}
        self._tell(key, "files", own_files)
        here = next(ranks for ranks in self._directories if self._rank in ranks)
        if self._rank != here[0]:
            return
        record.files = self._files_here(key, unfinished, here)
        record.hosts = list(self._hosts)
        record.ranks = list(here) if len(self._directories) > 1 else []
        self._directory.prepare(point, record)
        self._tell_directories(key, "prepared")
        self._directory.commit(point)
        self._tell_directories(key, "committed")
        try:
            then()
        except OSError:
            logger.warning("Older checkpoints could not be removed.", exc_info=True)

    def _files_here(self, key: str, unfinished: str, ranks: Sequence[int]) -> Dict[str, FileRecord]:
        """All files of this directory, when every rank of it has confirmed its own."""
        here: Dict[str, FileRecord] = {}
        for rank in ranks:
            here.update({n: FileRecord(*r) for n, r in self._told(key, "files", rank).items()})
        # What DeepSpeed has written by itself, such as its script for conversions.
        for name in set(file_names(unfinished)) - set(here):
            here[name] = _flush(os.path.join(unfinished, name))
        return here

    def _tell_directories(self, key: str, name: str) -> None:
        """Waits until the first rank of each directory has come as far."""
        self._tell(key, name, {})
        for ranks in self._directories:
            self._told(key, name, ranks[0])

    def _tell(self, key: str, name: str, value: Any) -> None:
        self._store.set(f"{key}/{name}/{self._rank}", json.dumps(value))

    def _told(self, key: str, name: str, rank: int) -> Any:
        """Waits for what a rank sets in the store."""
        key = f"{key}/{name}/{rank}"
        who = f"rank {rank}"
        if len(set(self._hosts)) > 1:
            who += f" on {self._hosts[rank]}"
        deadline = time.monotonic() + self._timeout
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"A checkpoint was not completed, because {who} has not confirmed "
                    f"within {self._timeout:.0f} seconds that it has written its files."
                )
            time.sleep(_POLLING_INTERVAL)
        told = json.loads(self._store.get(key))
        if isinstance(told, dict) and "error" in told:
            raise RuntimeError(
                f"A checkpoint was not completed, because {who} failed to write "
                f"it:\n{told['error']}"
            )
        return told


def _flush(path: str) -> FileRecord:
    files.flush(path)
    return FileRecord.of(path)
