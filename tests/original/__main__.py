"""
Compares with AllenNLP 2.10.1 as it was released: what it writes is loaded, predicts and trains
today, and the differences are written to `benchmarks/results/original.md`.

`python -m tests.original PYTHON` takes the Python of that environment. `--only roberta,gpt2` does
some, and says all of them.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.models import load_archive
from allennlp.training.util import evaluate

from benchmarks.harness import report
from tests.original import jobs
from tests.original.architectures import ARCHITECTURES
from tests.support.command import allennlp
from tests.support.experiment import PACKAGES, deepspeed, write_config

logger = logging.getLogger(__name__)

# Of predictions, metrics and weights, in fp32.
TOLERANCE = 2e-6

# Why today's numbers of an architecture are others.
CAUSES: Dict[str, str] = {
    "yoso": "its hashes are random numbers of another generator",
}


class Outcome(NamedTuple):
    """
    # Parameters

    name : `str`
    predictions : `Optional[float]`
        The largest difference of logits and metrics of the archive that was trained in 2022.
    weights : `Dict[str, float]`
        The largest difference of the weights and the losses after two epochs, by the trainer.
    problem : `str`
        An error, of 2022 or of today.
    """

    name: str
    predictions: Optional[float] = None
    weights: Dict[str, float] = {}
    problem: str = ""

    @property
    def is_same(self) -> bool:
        differences = [*self.weights.values()]
        differences += [] if self.predictions is None else [self.predictions]
        return not self.problem and max(differences, default=0.0) <= TOLERANCE


def compare(name: str, directory: Path, data: Path, stages: Sequence[int]) -> Outcome:
    for part in jobs.PARTS:
        error = directory / name / part / "error.txt"
        if error.exists():
            return Outcome(name, problem=f"2022: {error.read_text().strip().splitlines()[-1]}")
    try:
        part = "trained" if stages else "initial"
        predictions = _compare_predictions(directory / name, part, data)
        weights = {f"stage {s}": _compare_training(name, directory, data, s) for s in stages}
    except Exception as error:
        return Outcome(name, problem=f"{type(error).__name__}: {error}")
    return Outcome(name, predictions, weights)


def _compare_predictions(directory: Path, part: str, data: Path) -> float:
    former = json.loads((directory / "expected/outputs.json").read_text())
    archive = load_archive(directory / part / "model.tar.gz")
    archive.model.eval()
    instances = list(archive.validation_dataset_reader.read(data))
    for instance in instances:
        archive.validation_dataset_reader.apply_token_indexers(instance)
    outputs = archive.model.forward_on_instances(instances[: len(former["predictions"])])
    differences = [
        float(np.abs(np.array(then["logits"]) - now["logits"]).max())
        for then, now in zip(former["predictions"], outputs, strict=True)
    ]
    loader = SimpleDataLoader(instances, 4, vocab=archive.model.vocab)
    metrics = evaluate(archive.model, loader, cuda_device=-1)
    return max(*differences, *_differences(former["metrics"], metrics))


def _compare_training(name: str, directory: Path, data: Path, stage: int) -> float:
    """Two epochs from the same weights."""
    paths = directory / name
    config = jobs.classifier(paths / "transformer", data, name)
    config = deepspeed(jobs.from_archive(config, paths / "initial/model.tar.gz"), stage)
    with tempfile.TemporaryDirectory() as scratch:
        path, out = write_config(config, Path(scratch)), Path(scratch, "out")
        allennlp("train", path, "-s", out, *PACKAGES).check()
        differences: List[float] = []
        for epoch in range(2):
            metrics = f"metrics_epoch_{epoch}.json"
            then, now = (
                json.loads((each / metrics).read_text()) for each in (paths / "trained", out)
            )
            differences += _differences(then, now)
        weights = torch.load(out / "best.th")
        for key, value in torch.load(paths / "trained/best.th").items():
            if key in weights and value.is_floating_point():
                differences.append((weights[key] - value).abs().max().item())
    return max(differences)


def _differences(then: Dict[str, Any], now: Dict[str, Any]) -> List[float]:
    names = [name for name in then if name.endswith(("loss", "accuracy"))]
    return [abs(then[name] - now[name]) for name in names]


def markdown(heading: Dict[str, Any], outcomes: List[Outcome], minutes: float) -> str:
    same = [outcome for outcome in outcomes if outcome.is_same]
    stages = list(dict.fromkeys(stage for outcome in outcomes for stage in outcome.weights))
    lines = [
        f"{len(outcomes)} architectures of transformers 4.20.1 that AllenNLP 2.10.1 can embed: a "
        "small classifier over each was archived by AllenNLP on PyTorch 1.12.1 with Python 3.9. "
        f"Today the archive is loaded, predicts and is evaluated. {len(same)} are the same to "
        f"{TOLERANCE:.0e}.",
        "With stages of ZeRO, AllenNLP's trainer has trained the classifier for two epochs with "
        "SGD in 2022, and `deepspeed` today from the same weights: the largest difference of a "
        "loss, a metric or a weight.",
        "\n".join(
            [
                f"| Architecture | Predictions and metrics | {' | '.join(stages)} | |",
                f"|{' --- |' * (3 + len(stages))}",
                *(_row(outcome, stages) for outcome in outcomes),
            ]
        ),
        f"{report.describe(heading, with_workers=False)} {minutes:.0f} minutes. "
        "`make original ORIGINAL=python` runs it again, without a network.",
    ]
    return report.document("The original", *lines)


def _row(outcome: Outcome, stages: Sequence[str]) -> str:
    numbers = [outcome.predictions, *(outcome.weights.get(stage) for stage in stages)]
    cells = ["" if number is None else f"{number:.0e}" for number in numbers]
    cause = "" if outcome.is_same else CAUSES.get(outcome.name, outcome.problem or "**differs**")
    return f"| {outcome.name} | {' | '.join(cells)} | {cause.replace('|', '/')[:200]} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.original", description=__doc__)
    parser.add_argument("python", help="the Python of the environment of 2022")
    parser.add_argument("--only", help="these architectures, such as roberta,gpt2")
    parser.add_argument("--stages", default="0,2,3", help="of ZeRO; empty for no training")
    parser.add_argument("--directory", type=Path, help="keeps what 2022 writes, or has it already")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("allennlp", "allennlp_deepspeed", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    start = time.time()
    names = arguments.only.split(",") if arguments.only else list(ARCHITECTURES)
    stages = [int(stage) for stage in arguments.stages.split(",") if stage]
    with tempfile.TemporaryDirectory() as scratch:
        directory = (arguments.directory or Path(scratch)).absolute()
        directory.mkdir(exist_ok=True)
        data = directory / "data.jsonl"
        jobs.write_data(data)
        missing = [name for name in names if not (directory / name / jobs.PARTS[-1]).exists()]
        made = [
            job
            for name in missing
            for job in jobs.of_architecture(name, directory, data, trains=bool(stages))
        ]
        jobs.run(arguments.python, made, directory)
        outcomes = []
        for name in names:
            outcomes.append(compare(name, directory, data, stages))
            logger.info("%s", outcomes[-1])
    heading = report.heading(1, "transformers")
    raw = {**heading, "outcomes": [outcome._asdict() for outcome in outcomes]}
    minutes = (time.time() - start) / 60
    report.write(arguments.output, "original", raw, markdown(heading, outcomes, minutes))
    known = all(outcome.is_same or outcome.name in CAUSES for outcome in outcomes)
    sys.exit(0 if known else 1)


if __name__ == "__main__":
    main()
