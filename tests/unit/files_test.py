"""Tensors whose values are kept in files, and files that several processes remove."""

import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator
from unittest import mock

import pytest
import torch

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory


@pytest.mark.parametrize(
    "shape, dtype", [((), torch.float32), ((3, 4), torch.bool), ((0, 2), torch.int64)]
)
def test_mapped_tensors_are_tensors(tmp_path: Path, shape, dtype) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    mapped = files.empty_memory_mapped(tensor, str(tmp_path)).copy_(tensor)
    assert (mapped.shape, mapped.dtype) == (tensor.shape, tensor.dtype)
    files.save({"weight": mapped}, str(tmp_path / "saved.th"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved.th"]
    assert torch.equal(torch.load(tmp_path / "saved.th")["weight"], tensor)


def test_a_file_whose_tensor_was_never_made_is_cleaned_up(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with mock.patch.object(torch.UntypedStorage, "from_file", lambda *a, **k: os._exit(9)):
            files.empty_memory_mapped(torch.zeros(2), str(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 1
    CheckpointDirectory(str(tmp_path)).clean_up()
    assert list(tmp_path.iterdir()) == []


def test_there_may_be_more_of_them_than_files_may_be_open(tmp_path: Path) -> None:
    with _open_files_limited_to(128):
        mapped = [
            files.empty_memory_mapped(torch.zeros(2), str(tmp_path)).fill_(i) for i in range(300)
        ]
    assert [float(tensor.sum()) for tensor in mapped] == [2 * i for i in range(300)]


@contextmanager
def _open_files_limited_to(number: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_another_process_removes_at_the_same_time_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    path = tmp_path / "token"
    (path.mkdir if is_directory else path.touch)()
    other = shutil.rmtree if is_directory else os.remove
    monkeypatch.setattr(files, "before_operation", lambda _, path: other(path))
    files.remove(str(path))
    assert not path.exists()
