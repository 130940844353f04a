"""
Brings the files of a checkpoint whose parts are in several directories to where they are needed,
over the network.
"""

import logging
import os
from contextlib import suppress
from typing import Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist

from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.storage import files
from allennlp_deepspeed.storage.commit_record import CheckpointError, CommitRecord, FileRecord

logger = logging.getLogger(__name__)

_CHUNK_SIZE = 64 * 1024 * 1024  # bytes

_UNREADABLE = -1

FETCHED_SUFFIX = ".fetched"
"""Of a file that is on its way."""


class Transfer(NamedTuple):
    """
    # Parameters

    name : `str`
        Of the file in the checkpoint.
    source : `int`
        A rank that has it.
    target : `int`
        The rank whose directory is to have it.
    """

    name: str
    source: int
    target: int


def plan(holders: Mapping[str, List[int]], needed: Mapping[int, Iterable[str]]) -> List[Transfer]:
    """
    # Parameters

    holders : `Mapping[str, List[int]]`, required.
        For each file the directories that have it, by the first rank of each.
    needed : `Mapping[int, Iterable[str]]`, required.
        The files that each directory has to have, by its first rank.
    """
    return [
        Transfer(name, holders[name][0], target)
        for target, names in sorted(needed.items())
        for name in sorted(names)
        if target not in holders[name]
    ]


def carry_out(
    transfers: Sequence[Transfer], directory: str, record: CommitRecord, device: torch.device
) -> None:
    """
    To be called by every rank, with the same transfers and record.

    # Parameters

    transfers : `Sequence[Transfer]`, required.
    directory : `str`, required.
        Of the checkpoint, as this rank sees it.
    record : `CommitRecord`, required.
    device : `torch.device`, required.
        Where the process group communicates.

    # Raises

    `CheckpointError`
        On every rank, if a file has not arrived as it was written.
    """
    problems = []
    for transfer in transfers:
        path = os.path.join(directory, transfer.name)
        if dist.get_rank() == transfer.source:
            _send(path, transfer.target, device)
        elif dist.get_rank() == transfer.target:
            problem = _receive(path, transfer.source, device, record.versions_of(transfer.name))
            if problem is not None:
                problems.append(problem)
    found = [problem for problems in agreement.of_all(problems) for problem in problems]
    if found:
        raise CheckpointError("; ".join(found) + ".")
    received = [t.name for t in transfers if dist.get_rank() == t.target]
    if received:
        size = sum(record.files[name].bytes for name in received)
        logger.info("%d files (%d bytes) of %s came from others", len(received), size, directory)


def _send(path: str, target: int, device: torch.device) -> None:
    """What can't be read goes as zeros, which the checksum finds: the target waits for so much."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError:
        dist.send(torch.tensor([_UNREADABLE], device=device), target)
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        dist.send(torch.tensor([size], device=device), target)
        for length in _lengths(size):
            chunk = torch.zeros(length, dtype=torch.uint8)
            with suppress(OSError):
                file.readinto(chunk.numpy().data)
            dist.send(chunk.to(device), target)


def _receive(
    path: str, source: int, device: torch.device, versions: Sequence[FileRecord]
) -> Optional[str]:
    """Returns what is wrong with the file that has come, which is not kept then."""
    header = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(header, source)
    if header.item() == _UNREADABLE:
        return f"{path} can't be read by rank {source}"
    chunks = _chunks(int(header.item()), source, device)
    temporary_path = path + FETCHED_SUFFIX
    try:
        files.make_directory(os.path.dirname(path))
        files.write_bytes(chunks, temporary_path)
        files.flush(temporary_path)
        if FileRecord.of(temporary_path) in versions:
            files.rename(temporary_path, path)
            files.flush(os.path.dirname(path))
            return None
        problem = f"{path} has not arrived from rank {source} as it was written"
    except OSError as error:
        problem = f"{path} can't be written: {error}"
    for _ in chunks:
        pass  # the source goes on sending
    with suppress(OSError):
        files.remove(temporary_path)
    return problem


def _chunks(size: int, source: int, device: torch.device) -> Iterator[memoryview]:
    for length in _lengths(size):
        chunk = torch.empty(length, dtype=torch.uint8, device=device)
        dist.recv(chunk, source)
        yield chunk.cpu().numpy().data


def _lengths(size: int) -> List[int]:
    return [min(_CHUNK_SIZE, size - start) for start in range(0, size, _CHUNK_SIZE)]
