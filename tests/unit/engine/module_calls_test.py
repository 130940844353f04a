"""What is said of the modules that the workers of a node have called."""

from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch

from allennlp_deepspeed.engine.process.worker_failure import ERROR_FILE
from allennlp_deepspeed.engine.zero3.module_calls import explain_failure, trace_calls


class Loop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))

    def forward(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.cells[step % 2](torch.zeros(1))


class LoopModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()

    def forward(self, num_steps: int) -> None:
        self.loop(num_steps)


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Optional[str]]:
    def explain_what(*workers: Callable[[Any], None]) -> Optional[str]:
        """What is said of workers each of which does something with a model."""
        files = {rank: str(tmp_path / str(rank)) for rank in range(len(workers))}
        for rank, work in enumerate(workers):
            monkeypatch.setenv(ERROR_FILE, files[rank])
            model = LoopModel()
            with trace_calls(model):
                work(model)
        return explain_failure(files)

    return explain_what


@pytest.mark.parametrize("fewer, more", [(2, 3), (9000, 9500), (9000, 9501)])
def test_the_module_around_the_calls_that_differ_is_named(
    explain: Callable[..., Optional[str]], fewer: int, more: int
) -> None:
    message = explain(lambda model: model(fewer), lambda model: model(more))
    assert message is not None
    assert '["Loop"]' in message


def test_where_the_calls_are_the_same_no_module_is_named(
    explain: Callable[..., Optional[str]],
) -> None:
    message = explain(lambda model: model(2), lambda model: model(2))
    assert message is not None
    assert "Loop" not in message


def test_nothing_is_said_of_workers_in_different_passes_or_without_one(
    explain: Callable[..., Optional[str]],
) -> None:
    def twice(model: Any) -> None:
        model(2)
        model(2)

    assert explain(lambda model: model(2), twice) is None
    assert explain(lambda model: None, lambda model: None) is None


def test_a_second_engine_changes_nothing(explain: Callable[..., Optional[str]]) -> None:
    def with_a_second(model: Any) -> None:
        with trace_calls(torch.nn.Sequential(*(torch.nn.Identity() for _ in range(9)))):
            model(2)
        model(2)

    def twice(model: Any) -> None:
        model(2)
        model(3)

    message = explain(with_a_second, twice)
    assert message is not None
    assert '["Loop"]' in message
