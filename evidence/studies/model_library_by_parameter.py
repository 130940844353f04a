"""
Each parameter of allennlp-models' experiments and training configs trains with two workers as with
AllenNLP's own trainer and `DistributedDataParallel`, or differs for a known cause.

The experiments are trained as their files have them, with confidence checks, and with SGD, where
each parameter is compared by itself. Then the library's training configs, on the data of the
fixtures. The argument is a checkout of allennlp-models 2.10.1. `--only coref bidaf` trains some,
and `--keep` adds to the verdicts of an earlier invocation at the same commit.
"""

import argparse
import json
import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from evidence import report
from evidence.model_library.table import TOLERANCE, wrongly_refused
from evidence.model_library.table_by_parameter import is_fine, markdown_by_parameter
from evidence.studies.model_library import SIMILAR, SMALL, difference, in_checkout, ours

TIME = "an hour"

logger = logging.getLogger(__name__)

WORLD_SIZE = 2
ONLY = "experiments and configs with one of these in their path"

# A parameter whose update is less than this part of that of all may have moved by rounding alone:
# its difference is measured as a part of that.
SMALLEST = 1e-6
# How many units in the last place a parameter has moved by if a wrong gradient would show.
MOVED = 100
# How far from itself a parameter may be with another rounding, if that is to explain a difference.
MAX_ROUNDING = 1e-2

# In seconds. AllenNLP's metrics wait for ever if workers call them a different number of times.
TIME_LIMIT, DDP_TIME_LIMIT = 600, 90

EPSILON = float(np.finfo(np.float32).eps)


class Off(NamedTuple):
    """
    How far a parameter is off.

    # Parameters

    part : `float`
        Of its own update.
    name : `str`
    """

    part: float
    name: str


def off_by_parameter(reference: Any, outcome: Any) -> List[Off]:
    """Returns the parameters that aren't equal to the last bit, the worst first."""
    updates = _updates(reference)
    smallest = SMALLEST * float(np.sqrt(sum(update**2 for update in updates.values())))
    found = []
    for name, weight in reference.weights.items():
        distance = _norm(weight, outcome.weights[name])
        if distance > 0:
            size = max(updates[name], smallest)
            found.append(Off(distance / size if size > 0 else np.inf, name))
    return sorted(found, reverse=True)


def moved(reference: Any) -> Tuple[int, int, int]:
    """
    Returns how many parameters have moved by so much more than they are rounded that a gradient
    that is wrong by some percent would show, how many are trainable, and how many of these haven't
    moved at all.
    """
    sizes = {name: _norm(reference.weights[name], 0.0) for name in reference.trainable}
    updates = _updates(reference)
    enough = sum(updates[n] > MOVED * EPSILON * sizes[n] for n in sizes)
    return enough, len(sizes), sum(updates[n] == 0 for n in sizes)


def _updates(reference: Any) -> Dict[str, float]:
    return {n: _norm(w, reference.initial[n]) for n, w in reference.weights.items()}


def _norm(weight: Any, other: Any) -> float:
    return float(np.sqrt(np.square(weight - other, dtype=np.float64).sum()))


class Comparison:
    """The trainings of a config by two workers, and of variations of it that explain a verdict."""

    def __init__(self, config: Dict[str, Any], folder: Path, is_alone: bool = False) -> None:
        self._config = config
        self._folder = folder
        self._references: Dict[str, Any] = {}
        self._outcomes: Dict[str, Any] = {}
        self.is_alone = is_alone
        folder.mkdir()

    def reference(self, prepare: Any = None) -> Any:
        """
        With `gradient_descent` and AllenNLP's `DistributedDataParallel`; where that fails, in one
        process over the batches of all workers.
        """
        name = getattr(prepare, "__name__", "reference")
        if name not in self._references:
            if self._averages() or self.is_alone:
                self._references[name] = self._alone(name, prepare)
            else:
                outcome = self._train(self._config, name, prepare, DDP_TIME_LIMIT)
                if outcome.weights is None and not outcome.detected:
                    outcome = self._alone(name, prepare)
                self._references[name] = outcome
        return self._references[name]

    def _averages(self) -> bool:
        """Whether a callback computes with gradients that `DistributedDataParallel` averages."""
        from evidence.model_library import trial

        return f"{trial.MITIGATOR}_backward" in self._config["trainer"].get("callbacks", [])

    def _alone(self, name: str, prepare: Any) -> Any:
        from evidence.model_library import experiments, trial

        self.is_alone = True
        config = experiments.of_all_ranks(self._config, WORLD_SIZE)
        if self._averages():
            config["trainer"]["callbacks"] = [f"{trial.MITIGATOR}_of_the_mean"]
        return trial.train(config, 1, self._folder / f"{name} alone", prepare)

    def outcome(self, stage: int, prepare: Any = None) -> Any:
        name = f"stage {stage} {getattr(prepare, '__name__', '')}"
        if name not in self._outcomes:
            config = ours(self._config, WORLD_SIZE, stage)
            self._outcomes[name] = self._train(config, name, prepare)
        return self._outcomes[name]

    def _train(
        self, config: Dict[str, Any], name: str, prepare: Any = None, time_limit: float = TIME_LIMIT
    ) -> Any:
        from evidence.model_library import experiments, trial

        copied = experiments.copied(config)
        return trial.train(copied, WORLD_SIZE, self._folder / name, prepare, time_limit)

    def verdict(self, stage: int, by_parameter: bool = False) -> str:
        reference, outcome = self.reference(), self.outcome(stage)
        if outcome.refusal:
            both = "both: " if reference.weights is None else ""
            return f"{both}refused: {outcome.refusal}"
        if reference.weights is None:
            return f"REFERENCE: {reference.failure or reference.refusal}"
        if outcome.failure:
            return f"FAILS: {outcome.failure}"
        if not off_by_parameter(reference, outcome):
            return "0.0e+00"
        return self._of_parameters(outcome) if by_parameter else self._of_all(stage)

    def _of_parameters(self, outcome: Any) -> str:
        found = off_by_parameter(self.reference(), outcome)
        if found[0].part <= TOLERANCE:
            return f"{found[0].part:.1e}"
        worst, found = found[0], [off for off in found if off.part > TOLERANCE]
        found = [off for off in found if not self._is_last_digit(outcome, off)]
        if not found:
            return f"DIFFERS, {worst.part:.1e} in the last digit"
        unexplained = self._not_rounding(found)
        if unexplained:
            return f"DIFFERS: {unexplained[0].part:.1e} {unexplained[0].name}"
        return f"DIFFERS, {worst.part:.1e} in {worst.name}"

    def _is_last_digit(self, outcome: Any, off: Off) -> bool:
        """
        Whether all elements together are off by less than a unit in the last place, and by little
        of an update that is more than some of these.
        """
        reference = self.reference()
        weight = reference.weights[off.name]
        last = EPSILON * _norm(weight, 0.0)
        has_moved = _norm(weight, reference.initial[off.name]) > MOVED * last
        distance = _norm(weight, outcome.weights[off.name])
        return distance <= last and (off.part <= SMALL or not has_moved)

    def _not_rounding(self, found: List[Off]) -> List[Off]:
        """
        Returns those that are farther off than `gradient_descent` is from itself when it rounds
        differently, in this parameter.
        """
        from evidence.model_library import trial

        differently = self.reference(trial.round_differently)
        if differently.weights is None:
            return found
        itself = {off.name: off.part for off in off_by_parameter(self.reference(), differently)}
        updates = _updates(self.reference())
        smallest = SMALLEST * float(np.sqrt(sum(update**2 for update in updates.values())))

        def is_rounding(off: Off) -> bool:
            most = SIMILAR * itself.get(off.name, 0)
            return off.part <= most and (most <= MAX_ROUNDING or updates[off.name] <= smallest)

        return [off for off in found if not is_rounding(off)]

    def _of_all(self, stage: int) -> str:
        """Compares the norms of all weights, since Adam makes large steps of rounding."""
        from evidence.model_library import experiments, trial

        reference, outcome = self.reference(), self.outcome(stage)
        off = difference(reference, outcome)
        if off <= TOLERANCE:
            return f"{off:.1e}"
        worst = off_by_parameter(reference, outcome)
        if all(self._is_last_digit(outcome, part) for part in worst if part.part > TOLERANCE):
            return f"DIFFERS, {off:.1e} in the last digit"
        with_zeros = self.reference(trial.zero_unused_gradients)
        if stage > 0 and difference(with_zeros, outcome) <= TOLERANCE:
            return f"DIFFERS, {off:.1e} from gradients of 0"
        for text, changes in experiments.LESS_ROUNDING.items():
            config = experiments.with_adam(self._config, changes)
            if config is None:
                continue
            folder = self._folder / f"{text} {stage}"
            calm = Comparison(config, folder, self.is_alone)
            if difference(calm.reference(), calm.outcome(stage)) <= TOLERANCE:
                return f"DIFFERS, {off:.1e} {text}"
            zeros = calm.reference(trial.zero_unused_gradients)
            if stage > 0 and difference(zeros, calm.outcome(stage)) <= TOLERANCE:
                return f"DIFFERS, {off:.1e} from gradients of 0 {text}"
        itself = difference(reference, self.reference(trial.round_differently))
        if off <= SIMILAR * itself <= SMALL:
            return f"DIFFERS, {off:.1e} between two roundings"
        for text, changes in {"": {}, **experiments.LESS_ROUNDING}.items() if self.is_alone else ():
            config = experiments.with_adam(self._config, changes) if changes else self._config
            if config is None:
                continue
            calm = Comparison(config, self._folder / f"states {text} {stage}", self.is_alone)
            restored = calm.outcome(stage, trial.restore_states_of_training)
            if difference(calm.reference(), restored) <= TOLERANCE:
                return f"DIFFERS, {off:.1e} from states of the validation {text}".rstrip()
        return f"DIFFERS: {off:.1e} {worst[0].name}"


def run_config(
    file: Dict[str, Any], folder: Path, sgd: Optional[Dict[str, Any]] = None
) -> Dict[str, str]:
    """
    Returns a verdict of each cell: of the config as it is, with confidence checks, and of that with
    SGD, without. If stage 2 is refused, stage 0 is trained too.
    """
    from evidence.model_library import experiments

    verdicts: Dict[str, str] = {}
    trained = Comparison(file, folder / "file")
    stages = _accepted(trained, (2,) if sgd else (2, 3))
    verdicts["checks"] = _of_checks(trained, trained.outcome(stages[-1]))
    if trained.reference().detected:
        trainer = {**file["trainer"], "run_confidence_checks": False}
        without = {**file, "trainer": trainer}
        trained = Comparison(without, folder / "without checks", trained.is_alone)
    for stage in stages:
        verdicts[f"file {stage}"] = trained.verdict(stage)
    if sgd:
        plain = Comparison(experiments.with_sgd(sgd), folder / "sgd", trained.is_alone)
        if plain.reference().weights is not None:
            verdicts["moved"] = "{} of {}, {} unmoved".format(*moved(plain.reference()))
        for stage in _accepted(plain, (2, 3)):
            verdicts[f"sgd {stage}"] = plain.verdict(stage, by_parameter=True)
    return verdicts


def _accepted(comparison: Comparison, stages: Tuple[int, ...]) -> Tuple[int, ...]:
    """Returns the stages, and 0 if the first of them is refused."""
    return (*stages, 0) if comparison.outcome(stages[0]).refusal else stages


def _of_checks(comparison: Comparison, outcome: Any) -> str:
    """Compares what AllenNLP's confidence checks have seen and found."""
    reference = comparison.reference()
    if reference.checked is None or outcome.checked is None:
        return "DIFFERS: none" if reference.checked or outcome.checked else "none"
    theirs = reference.checked
    if comparison.is_alone:
        # One process has the batches of all workers in its first step, rank 0's first.
        theirs = theirs[: len(outcome.checked)]
    if (theirs, reference.detected) != (outcome.checked, outcome.detected):
        return f"DIFFERS: {len(theirs)} and {len(outcome.checked)} calls"
    found = f", {len(reference.detected)} pairs" if reference.detected else ""
    return f"{len(outcome.checked)} calls{found}{' alone' if comparison.is_alone else ''}"


def run_experiment(fixtures: Path, name: str) -> Dict[str, str]:
    from evidence.model_library import experiments, trial

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            file = experiments.read_unchanged(fixtures, name, folder)
            file = trial.make_vocabulary(file, folder)
            sgd = experiments.read(fixtures, name, folder)
            sgd["vocabulary"] = file["vocabulary"]
        except Exception as error:
            return {"reference": f"ERROR: {trial.in_short(error)}"}
        for key in ("run_confidence_checks", "run_sanity_checks"):
            file["trainer"].pop(key, None)
        return run_config(file, folder, sgd)


def run_training_config(name: str) -> Dict[str, str]:
    """Returns a verdict of each cell, on the data of the fixtures."""
    from evidence.model_library import training_configs, trial

    path = Path("training_config") / name
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            config = trial.make_vocabulary(training_configs.read(path, folder), folder)
        except Exception as error:
            return {"reference": f"ERROR: {trial.in_short(error)}"}
        return run_config(config, folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkout", type=Path, help="of allennlp-models 2.10.1")
    parser.add_argument("--keep", action="store_true", help="add to earlier verdicts")


def run(arguments: argparse.Namespace) -> bool:
    heading = report.heading(WORLD_SIZE, "transformers", "allennlp-models")
    data = (arguments.page.keep(heading) if arguments.keep else {}) or heading
    with in_checkout(arguments.checkout):
        from evidence.model_library import experiments, training_configs

        fixtures, folder = Path("test_fixtures"), Path("training_config")
        for key, names, train in (
            ("experiments", experiments.find(fixtures), partial(run_experiment, fixtures)),
            ("configs", training_configs.find(folder), run_training_config),
        ):
            results = data.setdefault(key, {})
            for name in names:
                chosen = any(part in f"{key} {name}" for part in arguments.only)
                if chosen if arguments.only else name not in results:
                    results[name] = train(name)
                    logger.info("%s %s: %s", key, name, json.dumps(results[name]))
                    arguments.page.write(data, markdown_by_parameter(data))
        data["checks"] = {
            name: training_configs.check(folder / name, stages=(2, 3))
            for name in training_configs.find(folder)
        }
    arguments.page.write(data, markdown_by_parameter(data))
    rows = [row for key in ("experiments", "configs") for row in data[key].items()]
    is_refused = any(map(wrongly_refused, data["checks"].values()))
    return all(is_fine(*row) for row in rows) and not is_refused
