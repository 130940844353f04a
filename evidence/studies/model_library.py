"""
The experiments of allennlp-models' fixtures train to the weights of AllenNLP's own trainer, in one
process and with two workers, or differ for a known cause; its training configs are checked.

The argument is a checkout of allennlp-models 2.10.1. `--only coref bidaf` trains some, and `--keep`
adds to the results of an earlier invocation at the same commit.
"""

import argparse
import logging
import math
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import numpy as np

from evidence import report
from evidence.model_library import stand_ins
from evidence.model_library.table import TOLERANCE, is_explained, markdown, wrongly_refused

TIME = "an hour"

ONLY = "experiments with one of these in their path"

logger = logging.getLogger(__name__)

# How many times as far as `gradient_descent` from itself a training may be, and how far that.
SIMILAR, SMALL = 4, 1e-3

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
    Returns how far all weights are off, relative to the update by training, and the parameter that
    has most of it if that is too much.
    """
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if outcome.failure:
        return f"FAILS: {outcome.failure}"
    off = difference(reference, outcome)
    if off <= TOLERANCE:
        return f"{off:.1e}"
    squares = _squares(reference.weights, outcome.weights)
    return f"DIFFERS: {off:.1e}, most in {max(squares, key=squares.__getitem__)}"


def difference(reference: Any, outcome: Any) -> float:
    """
    Returns the norm of the difference of all weights, divided by that of the update; infinity if
    either training failed.
    """
    if reference.weights is None or outcome.weights is None:
        return math.inf
    update = sum(_squares(reference.weights, reference.initial).values())
    if update == 0:
        return math.inf
    return math.sqrt(sum(_squares(reference.weights, outcome.weights).values()) / update)


def _squares(weights: Dict[str, Any], others: Dict[str, Any]) -> Dict[str, float]:
    return {
        name: np.square(weight - others[name], dtype=np.float64).sum()
        for name, weight in weights.items()
    }


class Trials:
    """
    The cells of an experiment. If one differs from its reference, variations of the reference are
    trained that may explain it.
    """

    def __init__(self, config: Dict[str, Any], folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._trained: Dict[str, Any] = {}
        folder.mkdir(exist_ok=True)

    def cell(self, world_size: int, stage: int) -> str:
        reference = self.reference(world_size)
        if reference.weights is None:
            return f"REFERENCE: {reference.failure or reference.refusal}"
        text = verdict(reference, self.outcome(world_size, stage))
        if text.startswith("DIFFERS"):
            return text.replace("DIFFERS", self._explanation(world_size, stage), 1)
        return text

    def _explanation(self, world_size: int, stage: int) -> str:
        """Returns the first variation that explains the difference, and what is left of it."""
        from evidence.model_library import trial

        for text, rest in self._variations(world_size, stage):
            if rest <= TOLERANCE:
                return f"DIFFERS, {rest:.1e} {text}"
        reference = self.reference(world_size)
        off = difference(reference, self.outcome(world_size, stage))
        for text, prepare in (
            ("between two roundings", trial.round_differently),
            # If all parameters are used, sparse gradients alone change.
            ("between two orders", trial.zero_unused_gradients),
        ):
            itself = difference(reference, self.reference(world_size, prepare))
            if off <= SIMILAR * itself <= SMALL:
                return f"DIFFERS, {itself:.1e} {text}"
        return "DIFFERS"

    def _variations(self, world_size: int, stage: int) -> Iterator[Tuple[str, float]]:
        from evidence.model_library import experiments, trial

        zeros = trial.zero_unused_gradients
        outcome = self.outcome(world_size, stage)
        if f"{trial.MITIGATOR}_backward" in self._config["trainer"].get("callbacks", []):
            trainer = {**self._config["trainer"], "callbacks": [f"{trial.MITIGATOR}_of_the_mean"]}
            of_the_mean = Trials({**self._config, "trainer": trainer}, self._folder / "of the mean")
            yield "of the mean", difference(of_the_mean.reference(world_size), outcome)
            return
        if stage > 0:
            yield "from gradients of 0", difference(self.reference(world_size, zeros), outcome)
        for text, changes in experiments.LESS_ROUNDING.items():
            config = experiments.with_adam(self._config, changes)
            if config is None:
                return
            calm = Trials(config, self._folder / f"{text} {world_size}x{stage}")
            outcome = calm.outcome(world_size, stage)
            yield text, difference(calm.reference(world_size), outcome)
            if stage > 0:
                rest = difference(calm.reference(world_size, zeros), outcome)
                yield f"from gradients of 0 {text}", rest

    def reference(self, world_size: int, prepare: Any = None) -> Any:
        """Trains with `gradient_descent`, over the batches of all ranks, in one process."""
        from evidence.model_library import experiments, trial

        plain = self._config
        if world_size > 1:
            plain = experiments.of_all_ranks(plain, world_size)
        name = f"reference{world_size}{getattr(prepare, '__name__', '')}"
        return self._train(name, lambda folder: trial.train(plain, 1, folder, prepare))

    def outcome(self, world_size: int, stage: int) -> Any:
        from evidence.model_library import trial

        changed = ours(self._config, world_size, stage)
        name = f"{world_size}x{stage}"
        return self._train(name, lambda folder: trial.train(changed, world_size, folder))

    def _train(self, name: str, train: Callable[[Path], Any]) -> Any:
        if name not in self._trained:
            self._trained[name] = train(self._folder / name)
        return self._trained[name]


def run_experiment(fixtures: Path, name: str) -> Dict[str, str]:
    """Returns a verdict of each cell."""
    from evidence.model_library import experiments, trial

    verdicts: Dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            config = experiments.read(fixtures, name, folder)
            config = trial.make_vocabulary(config, folder)
        except Exception as error:
            return {"reference": f"ERROR: {trial.in_short(error)}"}
        trials = Trials(config, folder)
        for world_size, stage in experiments.cells():
            verdicts[f"{world_size}x{stage}"] = trials.cell(world_size, stage)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkout", type=Path, help="of allennlp-models 2.10.1")
    parser.add_argument("--keep", action="store_true", help="add to earlier results")


def run(arguments: argparse.Namespace) -> bool:
    heading = report.heading(2, "transformers", "allennlp-models")
    data = arguments.page.keep(heading) if arguments.keep else {}
    data = data or {**heading, "results": {}, "training_configs": {}}
    results, configs = data["results"], data["training_configs"]
    with in_checkout(arguments.checkout):
        from evidence.model_library import experiments, training_configs

        fixtures = Path("test_fixtures")
        for name in experiments.find(fixtures):
            chosen = any(part in name for part in arguments.only)
            if chosen if arguments.only else name not in results:
                results[name] = run_experiment(fixtures, name)
                for key, text in results[name].items():
                    logger.info("%s %s: %s", name, key, text)
                arguments.page.write(data, markdown(heading, results, configs))
        if not arguments.only:
            configs.update(training_configs.check_all(Path("training_config")))
    arguments.page.write(data, markdown(heading, results, configs))
    cells = [(name, *cell) for name, verdicts in results.items() for cell in verdicts.items()]
    all_explained = all(is_explained(*cell) for cell in cells)
    return all_explained and not any(map(wrongly_refused, configs.values()))


@contextmanager
def in_checkout(checkout: Path) -> Iterator[None]:
    """Registers what the experiments of allennlp-models need, and works in a checkout of it."""
    with stand_ins.hub(with_large_models=True):
        from allennlp.common.util import import_module_and_submodules

        from evidence.model_library import experiments

        for package in ("allennlp.fairness", "allennlp_models"):
            import_module_and_submodules(package)
        experiments.install()
        os.chdir(checkout)
        yield
