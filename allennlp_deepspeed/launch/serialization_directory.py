"""
Divides the files of AllenNLP's train command among the workers. Of the workers that share a
serialization directory, the first creates it and writes the files that a directory has once. The
others wait.

AllenNLP's parent process creates the directory, the config, the vocabulary and the archive, and
names log files by the rank on the node. It has no hook there, so `SerializationDirectory` wraps the
functions that it calls.
"""

import logging
import os
import socket
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterator, Optional, Union
from unittest import mock

import torch.distributed as dist
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common import logging as common_logging
from allennlp.data import Vocabulary
from allennlp.training import util as training_util

from allennlp_deepspeed.checkpoint import start_record, vocabulary_files
from allennlp_deepspeed.checkpoint.shared_directories import Directories, remove_stale_tokens
from allennlp_deepspeed.engine.process import collectives, worker_failure
from allennlp_deepspeed.engine.process.worker_failure import PeerFailed
from allennlp_deepspeed.launch.directory_lock import DirectoryLock, cannot_write

logger = logging.getLogger(__name__)

_FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


@contextmanager
def create_once(store: Optional[dist.Store], lock: DirectoryLock) -> Iterator[bool]:
    """
    Context manager in which AllenNLP's `create_serialization_dir` locks the directory, and records
    in the store that this rank has created it. Yields whether this rank had created it before a
    launcher restarted it. It then creates none, because files that others have written since must
    remain, and must not be refused.

    # Parameters

    store : `Optional[dist.Store]`, required.
        A store that outlives the workers. `None` if nothing restarts them.
    lock : `DirectoryLock`, required.
    """
    create = training_util.create_serialization_dir
    key = f"directory/{os.environ.get('RANK', 0)}"
    is_ours = store is not None and store.check([key])

    def create_if_needed(params: Params, path: str, recover: bool, force: bool) -> None:
        try:
            if not recover and (is_ours or (os.path.isdir(path) and lock.is_alone())):
                os.makedirs(path, exist_ok=True)
            else:
                create(params, path, recover, force)
        except OSError as error:
            raise cannot_write(path, error) from error
        lock.acquire()
        if not recover:
            start_record.create(path)
        if store is not None:
            store.set(key, "")

    save = Vocabulary.save_to_files

    def save_recorded(vocabulary: Vocabulary, directory: str) -> None:
        _record(partial(save, vocabulary, directory), directory)

    with (
        mock.patch.object(training_util, "create_serialization_dir", create_if_needed),
        mock.patch.object(Vocabulary, "save_to_files", save_recorded),
    ):
        yield is_ours


def _record(save: Callable[[], None], directory: str) -> None:
    """Saves a vocabulary, and records that in the serialization directory that it is saved in."""
    serialization_dir, name = os.path.split(os.fspath(directory))
    if name != vocabulary_files.DIRECTORY:
        save()
        return
    start_record.add(serialization_dir, name)
    save()
    start_record.add(serialization_dir, name, start_record.fingerprint(directory))


class SerializationDirectory:
    """
    Serialization directory that several workers share or have one each of. Every worker must
    construct it.

    # Parameters

    directory : `Union[str, os.PathLike]`, required.
        Its path, before AllenNLP has checked it.
    """

    def __init__(self, directory: Union[str, os.PathLike]) -> None:
        self._directory = os.fspath(directory)
        self._directories = Directories.discover(self._directory)
        self._is_ready = False
        self._prepare_logging = common_logging.prepare_global_logging

    def remove_stale_tokens(self) -> None:
        """
        Removes files of workers of an earlier training that AllenNLP would take for a training's.
        """
        remove_stale_tokens(self._directory)

    @property
    def is_leader(self) -> bool:
        """Returns whether this worker writes the files that the directory has once."""
        return self._directories.is_leader

    def wait_until_ready(self, problem: Optional[str] = None) -> None:
        """
        Waits until every directory has the files that workers read, because reading data for the
        vocabulary may take any time. Every worker must call it. A second call does nothing.

        # Parameters

        problem : `str`, optional (default = `None`)
            The error of this worker, if it fails.

        # Raises

        `PeerFailed`
            If another worker fails.
        """
        if self._is_ready:
            return
        self._is_ready = True
        problems = collectives.wait_for_ranks("directory is ready", problem)
        others = [other for other in problems if other is not None]
        if others and problem is None:
            raise PeerFailed(others[0])

    def wait_for_all(self) -> None:
        """
        Waits until every worker is done, the leaders with `model.tar.gz` written. Every worker must
        call it. An agent whose workers have exited soon ends the others.
        """
        collectives.wait_for_ranks("training is done")
        # The store may end with rank 0.
        dist.barrier()
        worker_failure.stop_watching()

    @contextmanager
    def prepare_on_leader(self) -> Iterator[None]:
        """
        Context manager for AllenNLP's `train_model`, in which only the leader prepares the
        directory.
        """
        with ExitStack() as stack:
            patch = partial(_patch, stack)
            if not self.is_leader:
                patch(common_logging, "prepare_global_logging", _do_nothing)
                patch(training_util, "create_serialization_dir", self._wait_for_directory)
                # What AllenNLP writes under these names in the directory.
                patch(train_command, "CONFIG_NAME", os.devnull)
                patch(train_command, "META_NAME", os.devnull)
                patch(training_util, "make_vocab_from_params", self._leaders_vocabulary)
                patch(train_command, "archive_model", _do_nothing)
                patch(train_command.TrainModel, "finish", _do_nothing)
            try:
                yield
            except BaseException as error:
                self.wait_until_ready(f"{type(error).__name__}: {error}")
                raise

    @contextmanager
    def log_by_rank(self) -> Iterator[None]:
        """
        Context manager for AllenNLP's `_train_worker`, in which log files are named by global rank.
        """
        rank, name = dist.get_rank(), f"{dist.get_rank()}"
        if len(set(self._directories.hosts)) > 1:
            name = f"{rank} {socket.gethostname()}"
        log_file = f"out_worker{name.replace(' ', '_')}.log"
        named = partial(_prepare_logging, self._prepare_logging, log_file, name)
        with mock.patch.object(common_logging, "prepare_global_logging", named):
            yield

    def _wait_for_directory(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the directory, because AllenNLP reads the vocabulary next with `recover`."""
        self.wait_until_ready()

    def _leaders_vocabulary(self, params: Params, *args: Any, **kwargs: Any) -> Vocabulary:
        section = params.pop("vocabulary", Params({})).as_dict(quiet=True)
        special = {k: section[k] for k in ("padding_token", "oov_token") if k in section}
        return Vocabulary.from_files(os.path.join(self._directory, "vocabulary"), **special)


def _prepare_logging(
    prepare: Callable[..., None],
    log_file: str,
    name: str,
    directory: str,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    # A class, which what looks for files among the handlers can ask for.
    class LogFile(logging.FileHandler):
        def __init__(self, path: str) -> None:
            super().__init__(os.path.join(directory, log_file))

    with mock.patch.object(logging, "FileHandler", LogFile):
        prepare(directory, rank, world_size)
    for handler in logging.getLogger().handlers:
        # Not the console's own.
        if isinstance(handler, LogFile) or type(handler) is logging.StreamHandler:
            handler.setFormatter(logging.Formatter(f"{name} | {_FORMAT}"))


def _patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: the leader does it."""
