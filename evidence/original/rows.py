"""What the environment of 2022 made and what becomes of it today, a row of the table each."""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
from allennlp.common import Params
from allennlp.models import load_archive
from allennlp.models.archival import extracted_archive

from evidence.model_library import experiments, trial
from evidence.original import components, jobs, tokenizer_kinds
from evidence.original.architectures import ARCHITECTURES
from evidence.original.outputs import as_json, outputs
from evidence.studies.model_library import ours
from tests.support.saved_tokenizers import outputs as outputs_of_tokenizer

# Of predictions, metrics and weights, in fp32.
TOLERANCE = 2e-6


# Of a problem: it is not of today.
IN_2022 = "2022: "


class Row(NamedTuple):
    """
    # Parameters

    kind : `str`
    name : `str`
    differences : `Dict[str, float]`
        The largest one of each comparison, by the column.
    problem : `str`
        An error, of 2022 or of today, or what a stage refuses.
    """

    kind: str
    name: str
    differences: Dict[str, float] = {}
    problem: str = ""

    @property
    def is_same(self) -> bool:
        return not self.problem and self.is_close

    @property
    def is_close(self) -> bool:
        """Whether what has been compared is the same."""
        return max(self.differences.values(), default=0.0) <= TOLERANCE


class StageError(Exception):
    """
    Some stages don't train.

    # Parameters

    differences : `Dict[str, float]`
        Those of the others.
    problem : `str`
    """

    def __init__(self, differences: Dict[str, float], problem: str) -> None:
        super().__init__(problem)
        self.differences = differences


class Kind(NamedTuple):
    """
    # Parameters

    names : `List[str]`
    jobs : `Callable[[str, Path], List[jobs.Job]]`
        Those that make what is compared in a folder.
    compare : `Callable[[str, Path], Dict[str, float]]`
    """

    names: List[str]
    jobs: Callable[[str, Path], List[jobs.Job]]
    compare: Callable[[str, Path], Dict[str, float]]


def row(kind: str, name: str, directory: Path, compare: Callable[..., Dict[str, float]]) -> Row:
    for error in sorted(directory.rglob("error.txt"), key=os.path.getmtime):
        *_, why = error.read_text().strip().splitlines()
        return Row(kind, name, problem=f"{IN_2022}{why.strip()}")
    try:
        return Row(kind, name, compare(name, directory))
    except StageError as error:
        return Row(kind, name, error.differences, str(error))
    except Exception as error:
        return Row(kind, name, problem=trial.in_short(error))


def architectures(data: Path, stages: Sequence[int]) -> Kind:
    def compare(name: str, directory: Path) -> Dict[str, float]:
        config = jobs.classifier(directory / "transformer", data, name)
        return _compare_training(config, directory, stages)

    def make(name: str, directory: Path) -> List[jobs.Job]:
        return jobs.of_architecture(name, directory, data)

    return Kind(list(ARCHITECTURES), make, compare)


def library(checkout: Path, stages: Sequence[int]) -> Kind:
    """Experiments of the fixtures of allennlp-models."""

    def config(name: str, directory: Path) -> jobs.Config:
        return jobs.experiment(checkout, name, directory / "files")

    def make(name: str, directory: Path) -> List[jobs.Job]:
        made = config(name, directory)
        stand_ins = jobs.of_stand_ins(made, checkout, directory / "files")
        return [*stand_ins, *jobs.of_training(made, directory)]

    def compare(name: str, directory: Path) -> Dict[str, float]:
        return _compare_training(config(name, directory), directory, stages)

    return Kind(experiments.find(checkout / "test_fixtures"), make, compare)


def archives(checkouts: Sequence[Path]) -> Kind:
    """Those of the fixtures, whose data were elsewhere then."""
    found = {
        f"{checkout.name}/{path.parent.relative_to(checkout / 'test_fixtures')}": path
        for checkout in checkouts
        for path in sorted(checkout.glob("test_fixtures/**/model.tar.gz"))
    }

    def overrides(name: str) -> Dict[str, str]:
        with extracted_archive(found[name]) as extracted:
            config = Params.from_file(Path(extracted, "config.json")).as_flat_dict()
        moved = {key: _moved(value, checkouts) for key, value in config.items()}
        return {key: value for key, value in moved.items() if value is not None}

    def make(name: str, directory: Path) -> List[jobs.Job]:
        return jobs.of_archive(found[name], directory, overrides(name))

    def compare(name: str, directory: Path) -> Dict[str, float]:
        return _compare_outputs(found[name], directory, overrides(name))

    return Kind(list(found), make, compare)


def _moved(path: Any, checkouts: Sequence[Path]) -> Optional[str]:
    """The path of a file that was elsewhere among the fixtures."""
    if not isinstance(path, str) or "/" not in path or Path(path).exists():
        return None
    parts = Path(path).parts
    for start in range(len(parts)):
        pattern = str(Path("test_fixtures", "**", *parts[start:]))
        for checkout in reversed(checkouts):
            for found in sorted(checkout.glob(pattern)):
                return str(found)
    return None


def tokenizers() -> Kind:
    def make(name: str, directory: Path) -> List[jobs.Job]:
        return [{"do": "tokenizer", "directory": str(directory), "kind": name}]

    def compare(name: str, directory: Path) -> Dict[str, float]:
        return _compare_results(directory, outputs_of_tokenizer(directory))

    return Kind(list(tokenizer_kinds.KINDS), make, compare)


def registered() -> Kind:
    names = {f"{kind} {name}": (kind, name) for kind, name in components.names()}

    def make(name: str, directory: Path) -> List[jobs.Job]:
        kind, registered_name = names[name]
        job = {"do": "component", "directory": str(directory)}
        return [{**job, "kind": kind, "name": registered_name}]

    def compare(name: str, directory: Path) -> Dict[str, float]:
        return _compare_results(directory, as_json(components.output(*names[name])))

    return Kind(list(names), make, compare)


def trained(data: Path, stages: Sequence[int]) -> Kind:
    """Optimizers and schedulers, in trainings."""
    names = {
        f"{kind} {name}": (kind, name)
        for kind, name in components.names()
        if kind == "optimizer" or kind.endswith("scheduler")
    }

    def config(name: str) -> jobs.Config:
        kind, registered_name = names[name]
        section = {"type": registered_name, **components.ARGUMENTS.get(names[name], {})}
        return jobs.training_with(kind.replace(" ", "_"), section, data)

    def make(name: str, directory: Path) -> List[jobs.Job]:
        return jobs.of_training(config(name), directory)

    def compare(name: str, directory: Path) -> Dict[str, float]:
        return _compare_training(config(name), directory, stages)

    return Kind(list(names), make, compare)


def _compare_training(
    config: jobs.Config, directory: Path, stages: Sequence[int]
) -> Dict[str, float]:
    trained = directory / "trained"
    differences = _compare_outputs(trained / "model.tar.gz", directory)
    weights_file = str(trained / "last.th")
    weights = dict(
        load_archive(trained / "model.tar.gz", weights_file=weights_file).model.named_parameters()
    )
    initial = directory / "initial/model.tar.gz"
    before = load_archive(initial).model.named_parameters()
    assert any((weight != weights[name]).any() for name, weight in before), "nothing was trained"
    training = jobs.from_archive(config, initial)
    problems = []
    for stage in stages:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "out")
            outcome = trial.train(ours(training, 1, stage), 1, folder)
            if outcome.weights is None:
                problems.append(f"stage {stage}: {outcome.failure or outcome.refusal}")
                continue
            assert outcome.weights.keys() == weights.keys()
            found = [
                float(np.abs(weight - weights[name].detach().numpy()).max(initial=0))
                for name, weight in outcome.weights.items()
            ]
            for path in sorted(trained.glob("metrics_epoch_*.json")):
                then = _measured(json.loads(path.read_text()))
                now = json.loads((folder / path.name).read_text())
                found.append(difference(then, {name: now.get(name) for name in then}))
        differences[f"stage {stage}"] = max(found)
    if problems:
        raise StageError(differences, "; ".join(problems))
    return differences


def _measured(metrics: Dict[str, Any]) -> Dict[str, Any]:
    """Those of the model."""
    others = re.compile("best_|peak_|.*(duration|epochs?|_MB)$")
    return {name: value for name, value in metrics.items() if not others.match(name)}


def _compare_outputs(archive: Path, directory: Path, overrides: Any = None) -> Dict[str, float]:
    then = json.loads((directory / "expected/outputs.json").read_text())
    now = outputs(str(archive), overrides)
    assert then["predictions"], "no predictions"
    return {"predictions and metrics": difference(then, now)}


def _compare_results(directory: Path, now: Any) -> Dict[str, float]:
    then = json.loads((directory / "outputs.json").read_text())
    return {"results": difference(then, now)}


def difference(then: Any, now: Any) -> float:
    """
    The largest difference of two numbers at the same place, as a part of the former if that is more
    than 1; infinity if anything else differs.
    """
    if isinstance(then, dict) and isinstance(now, dict) and then.keys() == now.keys():
        return max((difference(then[key], now[key]) for key in then), default=0.0)
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return max(map(difference, then, now), default=0.0)
    if isinstance(then, float) and isinstance(now, (int, float)):
        if then == now or math.isnan(then) and math.isnan(now):
            return 0.0
        distance = abs(then - now) / max(1.0, abs(then))
        return math.inf if math.isnan(distance) else distance
    return 0.0 if then == now else math.inf
