"""What a worker reports as the reason of its end."""

import pytest
import torch.distributed as dist

from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted
from allennlp_deepspeed.engine.process.worker_failure import FailureReporter


def test_an_agreed_end_stays_one_when_others_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    reporter = FailureReporter(explanation=lambda error: None, log_to_files=lambda error: [])
    agreed = reporter.report(TrainingInterrupted("SIGTERM received", 15), step=3)
    assert agreed.is_agreed
    assert reporter.report(dist.DistNetworkError("Connection closed by peer"), step=3) is agreed
