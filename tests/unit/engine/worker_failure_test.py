"""What a worker reports as the reason of its end."""

import pytest
import torch.distributed as dist

from allennlp_deepspeed.engine import worker_failure
from allennlp_deepspeed.engine.interruption import TrainingInterrupted


def test_an_agreed_end_stays_one_when_others_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(worker_failure, "_log_to_files", lambda error: [])
    monkeypatch.setattr(worker_failure, "_reported", None)
    agreed = worker_failure.report(TrainingInterrupted("SIGTERM received", 15))
    assert agreed is not None and agreed.is_agreed
    assert worker_failure.report(dist.DistNetworkError("Connection closed by peer")) is agreed
