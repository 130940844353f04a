"""
Trains the experiments of the fixtures of allennlp-models with two workers beside `gradient_descent`
with AllenNLP's own `DistributedDataParallel`: each as its file has it, with confidence checks, and
with SGD, where each parameter is compared by itself. Writes
`benchmarks/results/models_library_by_parameter.md`. `--only coref,bidaf` trains some.
"""

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from benchmarks.harness import report
from tests.model_library import stand_ins
from tests.model_library.__main__ import difference, ours
from tests.model_library.table import TOLERANCE, markdown_by_parameter

logger = logging.getLogger(__name__)

WORLD_SIZE = 2

# Updates below this part of that of all parameters, and differences below these many units in the
# last place of a parameter, are rounding.
SMALLEST, ROUNDINGS = 1e-6, 4


def of_each_parameter(reference: Any, outcome: Any) -> Tuple[float, str]:
    """
    Returns how far the worst parameter is off, as a part of the update of its own, and its name.
    What weights round is no difference, and an update that may be rounding counts as that of
    `SMALLEST` of all.
    """
    updates = {n: _norm(w, reference.initial[n]) for n, w in reference.weights.items()}
    smallest = SMALLEST * float(np.sqrt(sum(update**2 for update in updates.values())))
    worst = (0.0, "")
    for name, weight in reference.weights.items():
        rounding = ROUNDINGS * np.finfo(np.float32).eps * _norm(weight, 0)
        off = max(_norm(weight, outcome.weights[name]) - rounding, 0)
        if off > 0:
            worst = max(worst, (off / max(updates[name], smallest), name))
    return worst


def _norm(weight: Any, other: Any) -> float:
    return float(np.sqrt(np.square(weight - other, dtype=np.float64).sum()))


def run_experiment(fixtures: Path, name: str) -> Dict[str, str]:
    """Returns a verdict of each cell."""
    from tests.model_library import experiments, trial

    verdicts: Dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            file = experiments.read_unchanged(fixtures, name, folder)
            file = trial.make_vocabulary(file, folder)
            sgd = experiments.with_sgd(experiments.read(fixtures, name, folder))
            sgd["vocabulary"] = file["vocabulary"]
        except Exception as error:
            return {"reference": f"ERROR: {trial.in_short(error)}"}
        for label, config, stages, compare in (
            ("file", file, (2,), _all_parameters),
            ("sgd", sgd, (2, 3), _by_parameter),
        ):
            reference = trial.train(experiments.copied(config), WORLD_SIZE, folder / label)
            for stage in stages:
                key = f"{label} {stage}"
                changed = ours(experiments.copied(config), WORLD_SIZE, stage)
                outcome = trial.train(changed, WORLD_SIZE, folder / key)
                verdicts[key] = _verdict(reference, outcome, compare)
    return verdicts


def _verdict(reference: Any, outcome: Any, compare: Callable[[Any, Any], str]) -> str:
    if outcome.refusal and outcome.refusal == reference.refusal:
        return f"both: {outcome.refusal}"
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if reference.weights is None:
        return f"REFERENCE: {reference.failure or reference.refusal}"
    if outcome.failure:
        return f"FAILS: {outcome.failure}"
    return compare(reference, outcome)


def _all_parameters(reference: Any, outcome: Any) -> str:
    return f"{difference(reference, outcome):.1e}"


def _by_parameter(reference: Any, outcome: Any) -> str:
    off, name = of_each_parameter(reference, outcome)
    return f"{off:.1e} {name}" if off > TOLERANCE else f"{off:.1e}"


def run(arguments: argparse.Namespace, names: List[str]) -> Dict[str, Dict[str, str]]:
    """Adds to the verdicts of earlier invocations, after each experiment, because it takes long."""
    heading = report.heading(WORLD_SIZE, "transformers", "allennlp-models")
    title = "models_library_by_parameter"
    results: Dict[str, Dict[str, str]] = report.read(arguments.output, title).get("results", {})
    for name in names:
        if name in results and not arguments.only:
            continue
        results[name] = run_experiment(Path("test_fixtures"), name)
        logger.info("%s: %s", name, json.dumps(results[name]))
        text = markdown_by_parameter(heading, results)
        report.write(arguments.output, title, {**heading, "results": results}, text)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model_library.by_parameter", description=__doc__
    )
    parser.add_argument("checkout", type=lambda path: Path(path).resolve())
    parser.add_argument("--only", help="experiments with one of these in their path, as in a,b")
    parser.add_argument("--output", type=lambda path: Path(path).resolve(), default=report.RESULTS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("allennlp", "allennlp_deepspeed", "allennlp_models", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with stand_ins.hub():
        from allennlp.common.util import import_module_and_submodules

        from tests.model_library import experiments

        for package in ("allennlp.fairness", "allennlp_models"):
            import_module_and_submodules(package)
        experiments.install()
        os.chdir(arguments.checkout)
        names = experiments.find(Path("test_fixtures"))
        if arguments.only:
            names = [n for n in names if any(part in n for part in arguments.only.split(","))]
        run(arguments, names)


if __name__ == "__main__":
    main()
