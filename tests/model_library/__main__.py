"""
Trains the experiments of the fixtures of allennlp-models beside AllenNLP's own trainer, and writes
what has become of them to `benchmarks/results/models_library.md`. `--only coref,bidaf` trains some.
"""

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict

import numpy as np

from benchmarks.harness import report
from tests.model_library import stand_ins
from tests.model_library.table import TOLERANCE, is_explained, markdown

logger = logging.getLogger(__name__)

# Those whose archive of stage 3 is evaluated and predicted with.
ARCHIVED = (
    "classification/biattentive_classification_network/experiment.json",
    "generation/bart/experiment.jsonnet",
    "generation/simple/experiment.json",
    "generation/t5/experiment.jsonnet",
    "lm/next_token_lm/experiment.json",
    "pair_classification/esim/experiment.json",
    "rc/dialog_qa/experiment.json",
    "structured_prediction/biaffine_dependency_parser/experiment.json",
    "tagging/crf_tagger/experiment.json",
    "vision/vilbert_vqa/experiment.jsonnet",
)


def verdict(reference: Any, outcome: Any) -> str:
    """
    Of all weights together, how far they are off, as a part of what training has changed, and the
    parameter that has most of it if that is too much.
    """
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if outcome.failure:
        return f"FAILS: {outcome.failure}"
    update, off = {}, {}
    digits = 0.0
    for name, after in reference.weights.items():
        units = np.abs(after - outcome.weights[name]) / np.spacing(np.abs(after))
        digits = max(digits, float(units.max(initial=0.0)))
        update[name] = np.square(after - reference.initial[name], dtype=np.float64).sum()
        off[name] = np.square(after - outcome.weights[name], dtype=np.float64).sum()
    total = sum(update.values())
    if total == 0:
        return "FAILS: the reference has no update"
    difference = math.sqrt(sum(off.values()) / total)
    if difference <= TOLERANCE:
        return f"{difference:.1e}"
    if digits <= 2:
        return f"DIFFERS in the last digit: {difference:.1e}"
    return f"DIFFERS: {difference:.1e}, most in {max(off, key=off.__getitem__)}"


class Trials:
    """What an experiment's cells are compared with, and the cells."""

    def __init__(self, config: Dict[str, Any], folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._references: Dict[int, Any] = {}

    def verdict(self, world_size: int, stage: int) -> str:
        from tests.model_library import experiments, trial

        if world_size not in self._references:
            plain = self._config
            if world_size > 1:
                plain = experiments.of_all_ranks(plain, world_size)
            directory = self._folder / f"reference{world_size}"
            self._references[world_size] = trial.train(plain, 1, directory)
        reference = self._references[world_size]
        if reference.weights is None:
            return f"REFERENCE: {reference.failure or reference.refusal}"
        changed = ours(self._config, world_size, stage)
        directory = self._folder / f"{world_size}x{stage}"
        return verdict(reference, trial.train(changed, world_size, directory))


def run_experiment(fixtures: Path, name: str) -> Dict[str, str]:
    """A verdict of each cell."""
    from tests.model_library import experiments, trial

    verdicts: Dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            config = experiments.read(fixtures, name, folder)
            config = trial.make_vocabulary(config, folder)
        except Exception as error:
            return {"reference": f"ERROR: {trial.in_short(error)}"}
        trials = Trials(config, folder)
        calm = experiments.with_large_eps(config)
        calm_folder = folder / "calm"
        calm_folder.mkdir()
        calm_trials = Trials(calm, calm_folder) if calm else None
        for world_size, stage in experiments.cells():
            text = trials.verdict(world_size, stage)
            if text.startswith("DIFFERS") and calm_trials is not None:
                again = calm_trials.verdict(world_size, stage)
                if re.match(r"[\d.]+e", again):
                    text = text.replace("DIFFERS", f"DIFFERS, {again} with a large eps", 1)
            verdicts[f"{world_size}x{stage}"] = text
        if name in ARCHIVED:
            changed = ours(config, 2, 3)
            failure = trial.use_archive(changed, folder / "vocabulary", folder / "2x3")
            verdicts["archive"] = f"FAILS: {failure}" if failure else "0e0"
    return verdicts


def ours(config: Dict[str, Any], world_size: int, stage: int) -> Dict[str, Any]:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    trainer = {
        **config["trainer"],
        "type": "deepspeed",
        "deepspeed_config": {"zero_optimization": zero},
    }
    changed = {**config, "trainer": trainer}
    if world_size > 1:
        changed["distributed"] = {"cuda_devices": [-1] * world_size}
        trainer.pop("cuda_device", None)
    return changed


def run(arguments: argparse.Namespace) -> Dict[str, Dict[str, str]]:
    """The verdicts of each cell, by the name of the experiment."""
    from allennlp.common.util import import_module_and_submodules

    from tests.model_library import experiments

    for package in ("allennlp.fairness", "allennlp_models"):
        import_module_and_submodules(package)
    experiments.install()
    os.chdir(arguments.checkout)
    fixtures = Path("test_fixtures")
    names = experiments.find(fixtures)
    if arguments.only:
        names = [n for n in names if any(part in n for part in arguments.only.split(","))]
    results = {}
    if arguments.raw and arguments.raw.exists():
        lines = map(json.loads, arguments.raw.read_text().splitlines())
        results = {line["name"]: line["verdicts"] for line in lines}
    for name in names:
        if name in results:
            continue
        results[name] = run_experiment(fixtures, name)
        for key, text in results[name].items():
            logger.info("%s %s: %s", name, key, text)
        if arguments.raw:
            with arguments.raw.open("a") as file:
                file.write(json.dumps({"name": name, "verdicts": results[name]}) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model_library", description=__doc__)
    parser.add_argument(
        "checkout", type=lambda path: Path(path).resolve(), help="of allennlp-models 2.10.1"
    )
    parser.add_argument("--only", help="experiments with one of these in their path, as in a,b")
    parser.add_argument(
        "--raw", type=Path, help="a file of verdicts, to which is added, to continue"
    )
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("allennlp", "allennlp_deepspeed", "allennlp_models", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    start = time.time()
    with stand_ins.hub():
        results = run(arguments)
    if not arguments.only:
        heading = report.heading(2, "transformers", "allennlp-models")
        minutes = (time.time() - start) / 60
        raw = {**heading, "results": results}
        report.write(
            arguments.output.resolve(), "models_library", raw, markdown(heading, results, minutes)
        )
    unexplained = [
        (name, *cell)
        for name, verdicts in results.items()
        for cell in verdicts.items()
        if not is_explained(name, *cell)
    ]
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
