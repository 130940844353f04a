"""
How long it takes from the command to the first step of two workers.

`allennlp train` with a small config, of which nothing takes time but to start it, and one of whose
workers is killed after its first step: how long the first step takes after the command, and after
the restart. And how long `allennlp deepspeed check` and `estimate` take to answer, and how many
modules and CPU seconds `import allennlp.commands` takes, with the late imports of the import hook
and without.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence import report
from evidence.harness import training

TIME = "5 minutes"

MARKS = "STARTUP_MARKS"

IMPORT = """
import resource, sys
import allennlp_deepspeed_import_hook as hook
if sys.argv[1] == "all at once":
    hook.SHIMS["allennlp"] = hook.SHIMS["allennlp"].replace("late_imports", "")
import allennlp.commands
usage = resource.getrusage(resource.RUSAGE_SELF)
print(len(sys.modules), usage.ru_utime + usage.ru_stime)
"""


def _mark(what: str) -> None:
    """Writes down when, in a run of this study. Does nothing in the study itself."""
    if MARKS in os.environ:
        with open(os.environ[MARKS], "a") as file:
            file.write(json.dumps([what, time.time()]) + "\n")


# AllenNLP imports it when it has imported itself and the package.
_mark("imported")


@TrainerCallback.register("mark_first_step")
class MarkFirstStep(TrainerCallback):
    """Marks when rank 0 has made its first step, and then kills it once."""

    @override
    def on_batch(self, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if not is_primary or not self.is_first:
            return
        self.is_first = False
        _mark("stepped")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    is_first = True


class Start(NamedTuple):
    """
    # Parameters

    imports : `float`
        Seconds until the command has imported everything.
    first_step : `float`
        From the command to the first step.
    restart : `float`
        From the end of a worker to the next one.
    """

    imports: float
    first_step: float
    restart: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, default=6)


def run(settings: argparse.Namespace) -> None:
    starts: List[Start] = []
    answers: Dict[str, List[float]] = {"check": [], "estimate": []}
    imports: Dict[str, List[Tuple[int, float]]] = {"late": [], "all at once": []}
    with tempfile.TemporaryDirectory() as directory:
        for i in range(settings.repetitions):
            starts.append(measure(Path(directory) / str(i)))
            for command, seconds in answers.items():
                seconds.append(_answer(command, Path(directory) / "0.json"))
            for when, counted in imports.items():
                counted.append(_import(when))
    data = {
        **report.heading(2, "transformers"),
        "starts": [start._asdict() for start in starts],
        "answers": answers,
        "imports": imports,
    }
    settings.page.write(data, text(data))


def measure(out: Path) -> Start:
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
    config["distributed"]["max_restarts"] = 1
    marks = out.with_suffix(".marks")
    start = time.time()
    training.train(config, out, "--include-package", __name__, **{MARKS: str(marks)})
    times: Dict[str, List[float]] = {}
    for line in marks.read_text().splitlines():
        what, moment = json.loads(line)
        times.setdefault(what, []).append(moment)
    first, second = times["stepped"]
    return Start(times["imported"][0] - start, first - start, second - first)


def _answer(command: str, config: Path) -> float:
    start = time.time()
    training.allennlp("deepspeed", command, config, "--include-package", __name__)
    return time.time() - start


def _import(when: str) -> Tuple[int, float]:
    """Returns the number of modules, and the CPU seconds."""
    command = [sys.executable, "-c", IMPORT, when]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    modules, seconds = output.split()[-2:]
    return int(modules), float(seconds)


def text(data: Dict[str, Any]) -> str:
    starts = [Start(**start) for start in data["starts"]]
    rows = [
        ("the command has imported everything", [start.imports for start in starts]),
        ("the first step of two workers", [start.first_step for start in starts]),
        ("the first step after a worker was killed", [start.restart for start in starts]),
        *((f"`allennlp deepspeed {name}`", seconds) for name, seconds in data["answers"].items()),
    ]
    cells = [
        [name, f"{statistics.median(seconds):.1f}", report.spread(report.quartiles(seconds))]
        for name, seconds in rows
    ]
    imports = [
        [when, str(counted[0][0]), f"{statistics.median(seconds for _, seconds in counted):.1f}"]
        for when, counted in data["imports"].items()
    ]
    return report.document(
        "From the command to the first step",
        f"{report.describe(data)}\nMedians of {len(starts)} repetitions.",
        report.table(("until", "seconds", "quartiles"), cells),
        "`import allennlp.commands`, with modules that few programs need imported:",
        report.table(("when", "modules", "CPU seconds"), imports),
    )
