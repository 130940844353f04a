"""
1,000 configs that are changed at random, as people do by mistake, train or are refused in short.

`--only 17` does one of the changes and says all of it.
"""

import argparse
import logging
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from evidence import report
from tests.fuzz import recipes
from tests.fuzz.mutations import KINDS, Mutation, mutate
from tests.fuzz.trial import (
    CONSTRUCTION,
    FAULT,
    OTHERS,
    REFUSED,
    TRAINED,
    Outcome,
    checked,
    trained,
)

# Registers what the fixtures name.
from tests.support import preload  # noqa: F401

TIME = "10 minutes"

SEED = 0

ONLY = "numbers of changes"


class Judged(NamedTuple):
    number: int
    recipe: str
    mutation: Mutation
    outcome: Outcome


def case(number: int, directory: Path, seed: int = SEED) -> Tuple[str, Mutation]:
    """The recipe that the case of a number changes, and what it makes of it."""
    name = recipes.NAMES[number % len(recipes.NAMES)]
    return name, mutate(recipes.recipe(name, directory), seed * 1_000_003 + number)


def judge(number: int, directory: Path, seed: int = SEED) -> Judged:
    name, mutation = case(number, directory, seed)
    outcome = checked(mutation.config)
    if outcome is None:
        outcome = train(mutation, directory / str(number))
    return Judged(number, name, mutation, outcome)


def train(mutation: Mutation, directory: Path) -> Outcome:
    try:
        return trained(mutation.config, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def judge_all(numbers: List[int], directory: Path, seed: int, at_once: int) -> List[Judged]:
    cases = [(number, *case(number, directory, seed)) for number in numbers]
    outcomes: Dict[int, Optional[Outcome]] = {}
    # One after another: a process is forked from one without other threads.
    for number, _, mutation in cases:
        outcomes[number] = checked(mutation.config)
    print(
        f"{sum(o is None for o in outcomes.values())} of {len(cases)} pass the check.", flush=True
    )

    def finish(each: Tuple[int, str, Mutation]) -> Judged:
        number, name, mutation = each
        outcome = outcomes[number] or train(mutation, directory / str(number))
        if outcome.name == FAULT:
            print(f"{number} ({name}): {mutation.what}\n{outcome.text}\n", flush=True)
        return Judged(number, name, mutation, outcome)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(finish, cases))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="trainings beside one another")


def run(arguments: argparse.Namespace) -> bool:
    logging.disable(logging.INFO)
    started = time.monotonic()
    numbers = list(map(int, arguments.only)) or list(range(arguments.cases))
    with tempfile.TemporaryDirectory() as directory:
        judged = judge_all(numbers, Path(directory), arguments.seed, arguments.jobs)
    raw = [[j.number, j.recipe, j.mutation.kind, j.mutation.what, *j.outcome] for j in judged]
    if arguments.only:
        for row in raw:
            print(*row, sep="\n")
    heading = report.heading(2)
    minutes = (time.monotonic() - started) / 60
    arguments.page.write(
        {**heading, "cases": raw}, markdown(heading, judged, arguments.seed, minutes)
    )
    return not any(each.outcome.name == FAULT for each in judged)


def markdown(heading: Dict[str, Any], judged: List[Judged], seed: int, minutes: float) -> str:
    names = [TRAINED, REFUSED, CONSTRUCTION, OTHERS, FAULT]
    counts = Counter((each.mutation.kind, each.outcome.name) for each in judged)
    counts.update(("all", each.outcome.name) for each in judged)
    rows = [[kind, *(str(counts[kind, name]) for name in names)] for kind in [*KINDS, "all"]]
    return report.document(
        "Configs changed at random",
        f"{len(judged)} changes, drawn with seed {seed}, of {len(recipes.NAMES)} "
        f"configs: the recipes, the tests' and {len(recipes.PASTED)} DeepSpeed configurations as "
        "they are pasted. Each that the check lets pass is trained by two workers with "
        "`allennlp train`.",
        report.table(["", *names], rows),
        f"{report.describe(heading, with_workers=False)} {minutes:.0f} minutes. "
        "`python -m evidence fuzz` runs it again.",
    )
