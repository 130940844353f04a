"""
Serialization directory of a training. Of the workers that share it, the first, its leader, creates
it and writes the files that a directory has once.
"""

import os
import socket
from contextlib import contextmanager
from typing import Iterator, Optional, Union
from unittest import mock

import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.meta import META_NAME, Meta
from allennlp.data import Vocabulary
from allennlp.models.archival import CONFIG_NAME
from allennlp.training import util as training_util

from allennlp_deepspeed.checkpoint import start_record, vocabulary_files
from allennlp_deepspeed.checkpoint.shared_directories import Directories, remove_stale_tokens
from allennlp_deepspeed.engine.process import collectives, worker_failure
from allennlp_deepspeed.launch.directory_lock import DirectoryLock, cannot_write


class SerializationDirectory:
    """
    Serialization directory that several workers share or have one each of. Every worker must
    construct it.

    # Parameters

    path : `Union[str, os.PathLike]`, required.
    store : `Optional[dist.Store]`, required.
        A store that outlives the workers. `None` if nothing restarts them.
    """

    def __init__(self, path: Union[str, os.PathLike], store: Optional[dist.Store]) -> None:
        self._path = os.fspath(path)
        self._store = store
        self._directories = Directories.discover(self._path)
        self._key = f"directory/{os.environ.get('RANK', 0)}"
        self.lock = DirectoryLock(self._path, store)
        self.is_ours = store is not None and store.check([self._key])
        """Whether this rank had created the directory before a launcher restarted it."""

    @property
    def leader(self) -> int:
        """The rank that writes the files that the directory has once."""
        return self._directories.own_group[0]

    @property
    def is_leader(self) -> bool:
        return self._directories.is_leader

    @property
    def worker_name(self) -> str:
        """The rank of this worker, with its host if there are several."""
        rank, hosts = dist.get_rank(), self._directories.hosts
        return f"{rank} {socket.gethostname()}" if len(set(hosts)) > 1 else f"{rank}"

    def remove_stale_tokens(self) -> None:
        """
        Removes files of workers of an earlier training that AllenNLP would take for a training's.
        """
        if collectives.world_size() > 1:
            remove_stale_tokens(self._path)

    def create(self, params: Params, recover: bool, force: bool) -> None:
        """
        Creates and locks the directory with its config, as AllenNLP's `create_serialization_dir`
        does. To be called by the leader.

        A directory that this training has created before a restart remains as it is: files that
        others have written since must remain, and must not be refused.
        """
        try:
            is_empty = os.path.isdir(self._path) and self.lock.is_alone()
            if not recover and (self.is_ours or is_empty):
                os.makedirs(self._path, exist_ok=True)
            else:
                training_util.create_serialization_dir(params, self._path, recover, force)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self.lock.acquire()
        if not recover:
            start_record.create(self._path)
        if self._store is not None:
            self._store.set(self._key, "")
        params.to_file(os.path.join(self._path, CONFIG_NAME))
        Meta.new().to_file(os.path.join(self._path, META_NAME))

    @contextmanager
    def recording_vocabulary(self) -> Iterator[None]:
        """
        Context manager in which the start's record has what vocabulary is saved in the directory.
        The train loop saves it, and has no hook there.
        """
        save = Vocabulary.save_to_files

        def save_recorded(vocabulary: Vocabulary, directory: str) -> None:
            path, name = os.path.split(os.fspath(directory))
            if name != vocabulary_files.DIRECTORY:
                save(vocabulary, directory)
                return
            start_record.add(path, name)
            save(vocabulary, directory)
            start_record.add(path, name, start_record.fingerprint(directory))

        with mock.patch.object(Vocabulary, "save_to_files", save_recorded):
            yield

    def wait_for_all(self) -> None:
        """
        Waits until every worker is done, the leaders with `model.tar.gz` written. Every worker must
        call it. An agent whose workers have exited soon ends the others.
        """
        if collectives.world_size() == 1:
            return
        collectives.wait_for_ranks("training is done")
        # The store may end with rank 0.
        dist.barrier()
        worker_failure.stop_watching()
