"""
How long it takes from the command to the first step of two workers.

`allennlp train` with a small config, of which nothing takes time but to start it: once with workers
that are forked from a process that has imported everything, once with workers that import it anew
(`ALLENNLP_DEEPSPEED_FORK=0`), in alternating order. The weights have to be the same. And how long
`allennlp deepspeed check` and `estimate` take to answer. Writes a table to `benchmarks/results`.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import torch
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides

from benchmarks.harness import report, training

FORKED, SPAWNED = "forked", "spawned"
MARKS = "STARTUP_MARKS"


def _mark(what: str) -> None:
    """Writes down when, in a run of this study. Does nothing in the study itself."""
    if MARKS in os.environ:
        with open(os.environ[MARKS], "a") as file:
            file.write(json.dumps([what, time.time()]) + "\n")


# AllenNLP imports it when it has imported itself and the package.
_mark("imported")


@TrainerCallback.register("mark_first_step")
class MarkFirstStep(TrainerCallback):
    """Marks when rank 0 has begun to construct its trainer, and when the first step is over."""

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._is_marked = False
        _mark("constructed")

    @overrides
    def on_batch(self, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if is_primary and not self._is_marked:
            self._is_marked = True
            _mark("stepped")


class Start(NamedTuple):
    """
    # Parameters

    imports : `float`
        Seconds until the command has imported everything.
    workers : `float`
        From then until rank 0 constructs its trainer: the check, vocabulary, workers, data, model.
    first_step : `float`
        From then until it is over: the engine, and the step.
    cpu : `float`
        Seconds of processor time of the whole command, to its end.
    """

    imports: float
    workers: float
    first_step: float
    cpu: float

    @property
    def seconds(self) -> float:
        """From the command to the first step."""
        return self.imports + self.workers + self.first_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=6)


def run(settings: argparse.Namespace) -> None:
    starts: Dict[str, List[Start]] = {FORKED: [], SPAWNED: []}
    answers: Dict[str, List[float]] = {"check": [], "estimate": []}
    weights: List[Dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as directory:
        for i in range(settings.pairs):
            for kind in (FORKED, SPAWNED) if i % 2 else (SPAWNED, FORKED):
                out = Path(directory) / f"{kind}_{i}"
                starts[kind].append(measure(out, kind))
                weights.append(torch.load(out / "best.th", weights_only=True))
            for command, seconds in answers.items():
                seconds.append(_answer(command, Path(directory) / f"{FORKED}_0.json"))
    first = weights[0]
    if any(not torch.equal(first[name], other[name]) for other in weights for name in first):
        raise RuntimeError("Forked and spawned workers have trained different weights.")
    data = {
        **report.heading(2, "transformers"),
        "starts": {kind: [start._asdict() for start in starts[kind]] for kind in starts},
        "answers": answers,
    }
    report.write(settings.output, "startup", data, text(data))
    report.show(text(data))


def measure(out: Path, kind: str) -> Start:
    """Trains in a directory that isn't there yet."""
    config = training.config(
        out.parent,
        [("one two three four", str(i % 2)) for i in range(8)],
        batch_size=2,
        num_workers=2,
        trainer={
            "type": "deepspeed",
            "deepspeed_config": {"zero_optimization": {"stage": 2}},
            "callbacks": ["mark_first_step"],
        },
        **training.transformer(width=64, num_layers=1),
    )
    marks = out.with_suffix(".marks")
    environment = {MARKS: str(marks), "ALLENNLP_DEEPSPEED_FORK": str(int(kind == FORKED))}
    cpu_before, start = _cpu_seconds(), time.time()
    training.train(config, out, "--include-package", __name__, **environment)
    cpu = _cpu_seconds() - cpu_before
    # The first of each: workers that are spawned import it again.
    times: Dict[str, float] = {}
    for line in marks.read_text().splitlines():
        what, moment = json.loads(line)
        times.setdefault(what, moment)
    return Start(
        times["imported"] - start,
        times["constructed"] - times["imported"],
        times["stepped"] - times["constructed"],
        cpu,
    )


def _answer(command: str, config: Path) -> float:
    start = time.time()
    training.allennlp("deepspeed", command, config, "--include-package", __name__)
    return time.time() - start


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def text(data: Dict[str, Any]) -> str:
    starts = {kind: [Start(**s) for s in of_kind] for kind, of_kind in data["starts"].items()}
    rows = []
    for kind, of_kind in starts.items():
        ratios = [own.seconds / spawned.seconds for own, spawned in zip(of_kind, starts[SPAWNED])]
        cpu_ratios = [own.cpu / spawned.cpu for own, spawned in zip(of_kind, starts[SPAWNED])]
        rows.append(
            [
                kind,
                *(
                    f"{statistics.median(getattr(start, part) for start in of_kind):.1f}"
                    for part in ("imports", "workers", "first_step", "seconds", "cpu")
                ),
                f"{statistics.median(ratios):.2f}",
                report.spread(report.quartiles(ratios)),
                f"{statistics.median(cpu_ratios):.2f}",
            ]
        )
    headings = (
        "workers are",
        "imports (s)",
        "until the trainer (s)",
        "until the first step (s)",
        "in all (s)",
        "CPU, to the end (s)",
        "ratio",
        "quartiles",
        "ratio of CPU time",
    )
    answers = [
        [f"`allennlp deepspeed {name}`", f"{statistics.median(seconds):.1f}"]
        for name, seconds in data["answers"].items()
    ]
    return report.document(
        "From the command to the first step",
        f"{report.describe(data)}\nMedians of {len(starts[FORKED])} pairs.",
        report.table(headings, rows),
        report.table(("command", "seconds"), answers),
    )
