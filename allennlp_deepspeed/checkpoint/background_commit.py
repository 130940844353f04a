"""
Commits checkpoints in a background thread while training continues.
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
from allennlp_deepspeed.engine.process.worker_device import start_thread

logger = logging.getLogger(__name__)

_POLLING_INTERVAL = 0.02  # seconds

# Unique across the commits of this process, because keys are never deleted from the store.
_numbers = itertools.count()


class BackgroundCommit:
    """
    Flushes the files that the ranks have saved to disk, and commits them when all ranks have
    confirmed that they are done. This runs in a thread, because flushing the files and reading them
    for their checksums takes longer than saving them. The ranks confirm through the process group's
    key-value store, which needs no collective.

    # Parameters

    directory : `CheckpointDirectory`, required.
    rank : `int`, required.
    directories : `Sequence[Sequence[int]]`, required.
        The ranks that share a directory, for each directory. The first rank of each directory
        commits its files when all directories are prepared (a two-phase commit).
    hosts : `Sequence[str]`, required.
        The host of each rank.
    timeout : `float`, required.
        Seconds after which a rank that has not confirmed counts as failed.
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
        on_committed: Callable[[], None],
    ) -> None:
        """
        Starts the commit of one checkpoint. Must be called on every rank, after `wait`.

        # Parameters

        point : `PointInTime`, required.
        record : `CommitRecord`, required.
            The record without its `files`.
        write : `Callable[[], List[str]]`, required.
            Writes the rest of this rank's files, and returns the paths of all of them.
        on_committed : `Callable[[], None]`, required.
            Called on the ranks that commit, after the checkpoint has been committed in the
            directories of all ranks. An `OSError` in it is only logged.
        """
        key = f"allennlp_deepspeed/checkpoint_{next(_numbers)}"
        self._thread = start_thread(self._run, key, point, record, write, on_committed)

    def wait(self, timeout: Optional[float] = None) -> None:
        """
        Waits until this rank has confirmed its files and, on a rank that commits, until the commit
        is done. Not a collective.

        # Parameters

        timeout : `float`, optional (default = `None`)
            Seconds to wait. It then returns silently, whether or not the commit is done.

        # Raises

        `BaseException`
            Any error of the thread.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error of the thread, if there is one. Doesn't wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, key: str, *args: Any) -> None:
        try:
            self._commit(key, *args)
        except BaseException as error:
            self._error = error
            # Every key that another rank may still wait for. If the store doesn't exist any more,
            # no rank waits.
            with suppress(dist.DistError):
                for name in ("files", "prepared", "committed"):
                    self._publish(key, name, _describe(error))

    def _commit(
        self,
        key: str,
        point: PointInTime,
        record: CommitRecord,
        write: Callable[[], List[str]],
        on_committed: Callable[[], None],
    ) -> None:
        unfinished = self._directory.unfinished_path(point)
        own_files = {os.path.relpath(path, unfinished): _flush(path) for path in write()}
        self._publish(key, "files", own_files)
        own_group = next(ranks for ranks in self._directories if self._rank in ranks)
        if self._rank != own_group[0]:
            return
        record.files = self._collect_file_records(key, unfinished, own_group)
        record.hosts = list(self._hosts)
        record.ranks = list(own_group) if len(self._directories) > 1 else []
        self._directory.prepare(point, record)
        self._synchronize_directories(key, "prepared")
        self._directory.commit(point)
        self._synchronize_directories(key, "committed")
        try:
            on_committed()
        except OSError:
            logger.warning("Could not remove older checkpoints.", exc_info=True)

    def _collect_file_records(
        self, key: str, unfinished: str, ranks: Sequence[int]
    ) -> Dict[str, FileRecord]:
        """
        Returns the records of all files of this directory, when each of its ranks has confirmed its
        own.
        """
        records: Dict[str, FileRecord] = {}
        for rank in ranks:
            records.update(
                {n: FileRecord(*r) for n, r in self._wait_for(key, "files", rank).items()}
            )
        # The link to the best weights.
        for name in set(file_names(unfinished)) - set(records):
            records[name] = _flush(os.path.join(unfinished, name))
        return records

    def _synchronize_directories(self, key: str, name: str) -> None:
        """Sets a key of this rank, and waits until the first rank of each directory has set it."""
        self._publish(key, name, {})
        for ranks in self._directories:
            self._wait_for(key, name, ranks[0])

    def _publish(self, key: str, name: str, value: Any) -> None:
        self._store.set(f"{key}/{name}/{self._rank}", json.dumps(value))

    def _wait_for(self, key: str, name: str, rank: int) -> Any:
        """Waits for a value that another rank sets in the store, and returns it."""
        key = f"{key}/{name}/{rank}"
        who = f"rank {rank}"
        if len(set(self._hosts)) > 1:
            who += f" on {self._hosts[rank]}"
        deadline = time.monotonic() + self._timeout
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The checkpoint was not committed, because {who} did not confirm within "
                    f"{self._timeout:.0f} s that its files are written."
                )
            time.sleep(_POLLING_INTERVAL)
        value = json.loads(self._store.get(key))
        if isinstance(value, dict) and "error" in value:
            message = f"The checkpoint was not committed, because {who} could not write its files"
            if value["errno"] is not None:
                raise OSError(value["errno"], f"{message}: {value['error']}", value["filename"])
            raise RuntimeError(f"{message}:\n{value['error']}")
        return value


def _describe(error: BaseException) -> Dict[str, Any]:
    """Describes the error of a rank for the others."""
    if isinstance(error, OSError) and error.errno is not None:
        return {"error": error.strerror, "errno": error.errno, "filename": error.filename}
    return {"error": traceback.format_exc(), "errno": None}


def _flush(path: str) -> FileRecord:
    files.flush(path)
    return FileRecord.from_file(path)
