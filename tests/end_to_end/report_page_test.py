"""`allennlp deepspeed report` shows what trainings have left."""

import re
from pathlib import Path
from typing import List

import pytest

from tests.support.command import allennlp
from tests.support.experiment import TWO_WORKERS, Experiments, Result, deepspeed, load_config

TIME_LIMIT = 60  # seconds


@pytest.fixture(scope="module")
def results(experiments: Experiments) -> List[Result]:
    changes = ({}, {"trainer.optimizer.lr": 0.02})
    return [
        experiments.run(deepspeed(load_config("tagger", TWO_WORKERS, change), 2))
        for change in changes
    ]


def test_runs_are_compared(results: List[Result], tmp_path: Path) -> None:
    directories = [result.serialization_dir for result in results]
    report = tmp_path / "report.html"
    run = allennlp("deepspeed", "report", *directories, "--output", report)
    assert str(report) in run.output.splitlines()
    html = report.read_text()
    assert len(html) < 2_000_000
    for title in ("Loss", "Accuracy", "Learning rate", "Samples a second"):
        assert f'"text":"{title}"' in html
    own = html[html.index("</head>") :]
    assert own.count("<td>finished</td>") == 2
    assert "<code>trainer.optimizer.lr</code>" in own
    for result in results:
        best = result.final_metrics()["best_validation_accuracy"]
        assert f"<td>{best:.6g}</td>" in own
    assert re.search("<code>checkpoint_e2_b0</code></td><td>2</td><td>0</td>", own)
    assert "train_micro_batch_size_per_gpu" in own, "Of the resolved configuration"
