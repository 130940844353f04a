"""
What each node writes of what AllenNLP's train command writes. Of the nodes that share a
serialization directory one makes it, and writes what a directory has once; the others wait for it.

AllenNLP has each node make the directory, the config, the vocabulary and the archive, under the
same names, and names log files by the rank on the node. It has no seam there, so `in_parent` and
`in_worker` put themselves around the functions that it calls.
"""

import logging
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Union
from unittest import mock

from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common import logging as common_logging
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models.archival import CONFIG_NAME
from allennlp.training import util as training_util

from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.storage import files, tokens

logger = logging.getLogger(__name__)

_FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


class NodeFiles:
    """
    Finds out which nodes share this one's serialization directory. To be constructed by every node.

    # Parameters

    job : `Job`, required.
        Whose members have met.
    serialization_dir : `Union[str, os.PathLike]`, required.
        Isn't looked at by AllenNLP yet.
    local_rank : `int`, optional (default = `0`)
        Of the first worker that this member starts. If it isn't 0, another member starts the first
        one of the node.

    # Raises

    `ConfigurationError`
        If this node can't write there.
    """

    def __init__(
        self, job: Job, serialization_dir: Union[str, os.PathLike], local_rank: int = 0
    ) -> None:
        self._job = job
        self._directory = os.fspath(serialization_dir)
        self._node_rank = node_rank = job.member.index
        self._first_rank_of_node = job.member.ranks[0] - local_rank
        self._hosts = [attendant.host for attendant in job.attendants]
        groups = self._find_groups()
        self.leader = next(nodes[0] for nodes in groups if node_rank in nodes)
        """The node that writes what this directory has once."""
        self._is_ready = len(groups) == len(self._hosts)  # where nobody waits for another
        if not self._is_ready:
            logger.info(
                "Nodes that share a serialization directory: %s",
                "; ".join(
                    ", ".join(f"{node} ({self._hosts[node]})" for node in nodes) for nodes in groups
                ),
            )

    @property
    def is_leader(self) -> bool:
        return self.leader == self._node_rank

    def any_node(self, value: bool) -> bool:
        """Whether `value` is true for any node. To be called by every node, once."""
        return any(self._job.gather("any node", value))

    def restore_config(self, params: Params) -> None:
        """
        For a training that is recovered: a node that has lost its disk gets the vocabulary of
        another, and `params` for the recorded config. Does nothing if no node has anything. To be
        called by every node.
        """
        has_one = os.path.isfile(os.path.join(self._directory, CONFIG_NAME))
        having = self._job.gather("directory config", has_one)
        if all(having) or not any(having):
            return
        is_first = self._node_rank == having.index(True)
        vocabularies = self._job.gather(
            "directory vocabulary", _texts(self._directory) if is_first else None
        )
        # Those that share a directory see the same.
        if not has_one and self.is_leader:
            logger.warning(
                "%s has nothing of the training that is recovered: it gets the vocabulary of %s.",
                self._directory,
                self._hosts[having.index(True)],
            )
            for name, text in next(v for v in vocabularies if v is not None).items():
                path = os.path.join(self._directory, "vocabulary", name)
                files.make_directory(os.path.dirname(path))
                files.write(text, path)
            params.to_file(os.path.join(self._directory, CONFIG_NAME))
        self._job.gather("directory restored", None)

    @contextmanager
    def in_parent(self) -> Iterator[None]:
        """Around AllenNLP's `train_model`."""
        host = self._hosts[self._node_rank]
        log_file = "out.log" if self.is_leader else f"out_node{self._node_rank}_{host}.log"
        with ExitStack() as stack:
            patch = partial(_patch, stack)
            patch(common_logging, "prepare_global_logging", _logging(log_file, host))
            patch(
                training_util,
                "create_serialization_dir",
                partial(self._create_directory, training_util.create_serialization_dir),
            )
            if not self.is_leader:
                # What AllenNLP writes under these names in the directory.
                patch(train_command, "CONFIG_NAME", os.devnull)
                patch(train_command, "META_NAME", os.devnull)
                patch(training_util, "make_vocab_from_params", self._leaders_vocabulary)
                patch(train_command, "archive_model", _archive_nothing)
            yield

    def wait_until_ready(self) -> None:
        """
        Until every directory has what workers read. To be called by every node before it starts
        them.
        """
        if not self._is_ready:
            self._is_ready = True
            self._job.gather("vocabulary in the shared directory", None, waits=True)

    def in_worker(self, prepare: Optional[Callable[[], None]]) -> Callable[[], None]:
        """What each worker is to call first, `prepare` included. It can be pickled."""
        host = self._hosts[self._node_rank]
        return partial(_in_worker, self._first_rank_of_node, host, self.is_leader, prepare)

    def _find_groups(self) -> List[List[int]]:
        key = self._job.gather("directory key", tokens.new_key())[0]
        try:
            tokens.put(self._directory, key, self._node_rank)
        except OSError as error:
            raise ConfigurationError(
                f"{self._hosts[self._node_rank]} can't write to the serialization directory "
                f"{self._directory}: {error}"
            ) from error
        self._job.gather("directory token", None)
        seen = self._job.gather("directory tokens seen", tokens.seen(self._directory, key))
        tokens.remove(self._directory, key, self._node_rank)
        self._job.gather("directory tokens removed", None)
        return tokens.groups(seen)

    def _create_directory(self, create: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.is_leader:
            # AllenNLP takes a directory that isn't empty for another training's.
            tokens.remove_left(self._directory)
            create(*args, **kwargs)
        if not self._is_ready:
            # What the others write there next would be taken for another training's.
            self._job.gather("directory made", None)

    def _leaders_vocabulary(self, params: Params, *args: Any, **kwargs: Any) -> Vocabulary:
        logger.info("%s makes the vocabulary in %s", self._hosts[self.leader], self._directory)
        self.wait_until_ready()
        section = params.pop("vocabulary", Params({})).as_dict(quiet=True)
        special = {k: section[k] for k in ("padding_token", "oov_token") if k in section}
        return Vocabulary.from_files(os.path.join(self._directory, "vocabulary"), **special)


def _in_worker(
    first_rank: int, host: str, is_leader: bool, then: Optional[Callable[[], None]]
) -> None:
    """In the process of a worker, for as long as it lives."""
    if then is not None:
        then()
    prepare = common_logging.prepare_global_logging

    def prepare_global_logging(directory: str, rank: int = 0, world_size: int = 1) -> None:
        global_rank = first_rank + rank
        log_file, name = f"out_worker{global_rank}_{host}.log", f"{global_rank} {host}"
        _logging(log_file, name, prepare)(directory, rank, world_size)

    common_logging.prepare_global_logging = prepare_global_logging  # type: ignore[assignment]
    if not is_leader:
        train_command.archive_model = _archive_nothing  # type: ignore[assignment]
        train_command.TrainModel.finish = _finish_nothing  # type: ignore[method-assign]


def _logging(
    log_file: str, name: str, prepare: Optional[Callable[..., None]] = None
) -> Callable[..., None]:
    """AllenNLP's `prepare_global_logging`, with another file and a name before each line."""
    prepare = prepare or common_logging.prepare_global_logging

    def prepare_global_logging(directory: str, rank: int = 0, world_size: int = 1) -> None:
        # A class, which what looks for files among the handlers can ask for.
        class LogFile(logging.FileHandler):
            def __init__(self, path: str) -> None:
                super().__init__(os.path.join(directory, log_file))

        with mock.patch.object(logging, "FileHandler", LogFile):
            prepare(directory, rank, world_size)
        for handler_ in logging.getLogger().handlers:
            handler_.setFormatter(logging.Formatter(f"{name} | {_FORMAT}"))

    return prepare_global_logging


def _patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value))


def _archive_nothing(serialization_dir: Union[str, os.PathLike], **kwargs: Any) -> None:
    logger.info("%s is archived by the node that has made it", serialization_dir)


def _finish_nothing(self: train_command.TrainModel, metrics: Dict[str, Any]) -> None:
    """The first rank of the directory writes the metrics."""


def _texts(serialization_dir: str) -> Dict[str, str]:
    folder = Path(serialization_dir, "vocabulary")
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
