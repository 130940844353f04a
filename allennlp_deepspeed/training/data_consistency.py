"""Checks that all ranks have read the same data."""

import hashlib
import os
import socket
from typing import Any, Dict, List, NamedTuple, Optional

from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Vocabulary
from allennlp.data.data_loaders import DataLoader, MultiProcessDataLoader

from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.versions import differences, versions


class _Setup(NamedTuple):
    """Data and packages of a rank."""

    host: str
    values: Dict[str, Any]
    """Values that must be equal on all ranks, by name."""
    counts: Dict[str, Optional[int]]
    """The number of instances that AllenNLP has given this rank of each data set."""
    without_instance: List[str]
    """The data sets of which this rank has read none."""


def check_same_data(vocab: Optional[Vocabulary], loaders: Dict[str, Optional[DataLoader]]) -> None:
    """
    Compares the vocabulary, the data and the versions of packages of all ranks with one all-gather.
    Every rank must call it.

    Each data set must have an instance. With several ranks the sizes of files are compared if
    AllenNLP shards them between the ranks, and the number of instances if it shards instances: rank
    0 then has the same number as the last rank, or one more. The number of instances isn't compared
    for a reader that shards lines (`shard_iterable`) and skips some, or for data that are read
    during training. Nothing is compared for a reader with its own sharding, which may give each
    node its own files.

    # Parameters

    vocab : `Vocabulary`, required.
        `None` if the model has none.
    loaders : `Dict[str, Optional[DataLoader]]`, required.
        The data loaders by their keys in the config.

    # Raises

    `ConfigurationError`
        On every rank, if they differ. The message has the values of each rank.
    """
    counts = {name: _num_sharded_instances(loader) for name, loader in loaders.items()}
    if collectives.world_size() == 1:
        _check_not_empty([counts])
        return
    without_instance = [name for name, loader in loaders.items() if _has_no_instance(loader)]
    values = {**_namespaces(vocab), **versions()}
    own = _Setup(socket.gethostname(), values, counts, without_instance)
    for name, loader in loaders.items():
        if type(loader) is MultiProcessDataLoader and _is_sharded_by_allennlp(loader.reader):
            size = _file_size(loader.data_path)
            own.values[f"{name}, size of the file"] = size
    everyones = collectives.all_gather_object(own)
    _check_not_empty([setup.counts for setup in everyones])
    names = [f"rank {rank} ({setup.host})" for rank, setup in enumerate(everyones)]
    lines = differences([(name, setup.values) for name, setup in zip(names, everyones)])
    empty = [
        f"{name} has no instance of '{path}'"
        for name, setup in zip(names, everyones)
        for path in setup.without_instance
    ]
    if lines and empty and all(_is_even_split([s.counts[n] for s in everyones]) for n in loaders):
        # The cause of the differences: a namespace may be added with the first instance.
        raise ConfigurationError(f"{', '.join(empty)}: use fewer workers, or add instances.")
    for loader_name in loaders:
        counts = [setup.counts[loader_name] for setup in everyones]
        if not _is_even_split(counts):
            which = ", ".join(f"{count} on {name}" for count, name in zip(counts, names))
            lines.append(
                f"'{loader_name}' gave the ranks numbers of instances that aren't shares of the "
                f"same data: {which}"
            )
    if lines:
        raise ConfigurationError("\n".join(["The ranks' training data differ:", *lines]))


def _check_not_empty(everyones: List[Dict[str, Optional[int]]]) -> None:
    for name in everyones[0]:
        if all(counts[name] == 0 for counts in everyones):
            raise ConfigurationError(
                f"The dataset reader found no instance in '{name}': write the path of a file with "
                "instances, or, for validation data, remove the key."
            )


def _namespaces(vocab: Optional[Vocabulary]) -> Dict[str, str]:
    if vocab is None:
        return {}
    summaries = {}
    for namespace in sorted(vocab.get_namespaces()):
        tokens = vocab.get_index_to_token_vocabulary(namespace)
        # A pretrained tokenizer returns its tokens in another order in each process.
        text = "\n".join(f"{index} {token}" for index, token in sorted(tokens.items()))
        digest = hashlib.sha256(text.encode()).hexdigest()
        summaries[f"vocabulary, {namespace}"] = f"{len(tokens)} tokens, SHA-256 {digest[:8]}"
    return summaries


def _is_sharded_by_allennlp(reader: DatasetReader) -> bool:
    """Returns whether AllenNLP lets each rank take its shard of all instances or lines."""
    names = getattr(type(reader)._read, "__code__", None)
    return not reader.manual_distributed_sharding or (
        names is not None and DatasetReader.shard_iterable.__name__ in names.co_names
    )


def _file_size(path: Any) -> Optional[str]:
    is_file = isinstance(path, (str, os.PathLike)) and os.path.isfile(path)
    return f"{os.path.getsize(path):,} bytes" if is_file else None


def _has_no_instance(loader: Optional[DataLoader]) -> bool:
    instances = loader._instances if type(loader) is MultiProcessDataLoader else None
    return instances is not None and len(instances) == 0


def _num_sharded_instances(loader: Optional[DataLoader]) -> Optional[int]:
    if type(loader) is not MultiProcessDataLoader or loader._instances is None:
        return None
    return None if loader.reader.manual_distributed_sharding else len(loader._instances)


def _is_even_split(counts: List[Optional[int]]) -> bool:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return True
    return known == sorted(known, reverse=True) and known[0] - known[-1] <= 1
