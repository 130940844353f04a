"""What a worker asks of its device, and what it tells DeepSpeed of it."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List
from unittest import mock

import psutil
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from allennlp_deepspeed.engine.process import worker_device
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.process.worker_device import available_memory, capabilities
from tests.support.workers import run_workers


@contextmanager
def gpus(*capability: int) -> Iterator[None]:
    """As many, of these major compute capabilities: 7 for T4 and V100, 8 for A100."""
    current = [0]

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(torch.device(which).index)
        yield
        current.pop()

    properties = [mock.Mock(major=major) for major in capability]
    with mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: len(capability),
        device=device,
        current_device=lambda: current[-1],
        get_device_properties=lambda index: properties[index],
        _check_bf16_tensor_supported=lambda index: True,  # emulated
    ):
        yield


def test_a_gpu_that_emulates_bf16_has_none() -> None:
    with gpus(7):
        assert capabilities(torch.device("cuda", 0))["bf16_supported"] is False
    with gpus(8):
        assert capabilities(torch.device("cuda", 0))["bf16_supported"] is True
    assert capabilities(torch.device("cpu"))["bf16_supported"] is True


def test_it_is_the_gpu_that_trains_which_is_asked() -> None:
    with gpus(8, 7):
        assert capabilities(torch.device("cuda", 1))["bf16_supported"] is False


def test_deepspeed_follows_from_the_cpu_to_a_gpu_and_back() -> None:
    def names(rank: int) -> List[str]:
        names = []
        for device in ("cpu", "cuda", "cpu"):
            with process_environment(torch.device(device), rank):
                names.append(get_accelerator().device_name())
        return names

    assert run_workers(1, names) == [["cpu", "cuda", "cpu"]]


@pytest.mark.parametrize(
    "own_group, files, expected",
    [
        pytest.param(
            "0::/job\n",
            {
                "job/memory.max": "1000",
                "job/memory.current": "900",
                "job/memory.stat": "anon 5\ninactive_file 50\n",
            },
            150,
            id="limit",
        ),
        pytest.param(
            "0::/job/step\n",
            {
                "job/step/memory.max": "max",
                "job/step/memory.current": "900",
                "job/memory.max": "1000",
                "job/memory.current": "1020",
                "job/memory.stat": "inactive_file 10\n",
            },
            0,
            id="limit of a group around it",
        ),
        pytest.param(
            "4:memory:/not/in/the/container\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
            },
            150,
            id="version 1, in a container",
        ),
        pytest.param("0::/job\n", {"job/memory.max": "max"}, 10**6, id="no limit"),
    ],
)
def test_memory_is_available_within_the_limits_of_control_groups(
    own_group: str, files: Any, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: mock.Mock(available=10**6))
    monkeypatch.setattr(worker_device, "_CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(worker_device, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own_group)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory() == expected
