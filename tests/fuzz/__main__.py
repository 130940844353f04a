"""
Changes recipes and pasted configurations at random, and writes what has become of them to
`benchmarks/results/fuzz.md`, and all of it to `raw/fuzz.json` there. `--case 17` does one of them
and says all of it.
"""

import argparse
import json
import logging
import platform
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from tests.fuzz import recipes
from tests.fuzz.mutations import KINDS, Mutation, mutate
from tests.fuzz.trial import (
    CHECKED,
    CONSTRUCTION,
    FAULT,
    MISSED,
    OTHERS,
    REFUSED,
    TRAINED,
    TRIED,
    Outcome,
    checked,
    trained,
    tried,
)

# Registers what the fixtures name.
from tests.support import preload  # noqa: F401
from tests.support.command import REPOSITORY

SEED = 0

_RESULTS = REPOSITORY / "benchmarks" / "results"


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


def try_all(numbers: List[int], directory: Path, seed: int) -> List[Judged]:
    """Judges each by `allennlp deepspeed check --try`."""
    judged = []
    for number in numbers:
        name, mutation = case(number, directory, seed)
        outcome = tried(mutation.config, directory / str(number))
        shutil.rmtree(directory / str(number), ignore_errors=True)
        judged.append(Judged(number, name, mutation, outcome))
        if outcome.name in (FAULT, MISSED):
            print(f"{number} ({name}): {mutation.what}\n{outcome.text}\n", flush=True)
    return judged


def _table(judged: List[Judged], names: List[str]) -> str:
    counts = Counter((each.mutation.kind, each.outcome.name) for each in judged)
    totals = Counter(each.outcome.name for each in judged)
    rows = [
        f"| {kind} | " + " | ".join(str(counts[kind, name]) for name in names) + " |"
        for kind in KINDS
    ]
    total = "| all | " + " | ".join(str(totals[name]) for name in names) + " |"
    header = "| | " + " | ".join(names) + " |"
    return "\n".join([header, "| --- |" + " --- |" * len(names), *rows, total])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--case", type=int, nargs="+", help="only these, of which all is said")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument(
        "--try",
        dest="tries",
        action="store_true",
        help="judge by `allennlp deepspeed check --try`, and write `check_and_try.md` instead",
    )
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    started = time.monotonic()
    numbers = arguments.case or list(range(arguments.cases))
    with tempfile.TemporaryDirectory() as directory:
        if arguments.tries:
            judged = try_all(numbers, Path(directory), arguments.seed)
        else:
            judged = judge_all(numbers, Path(directory), arguments.seed, arguments.at_once)
    raw = [[j.number, j.recipe, j.mutation.kind, j.mutation.what, *j.outcome] for j in judged]
    if arguments.case:
        for row in raw:
            print(*row, sep="\n")
        return
    name = "check_and_try" if arguments.tries else "fuzz"
    (_RESULTS / "raw").mkdir(exist_ok=True)
    (_RESULTS / "raw" / f"{name}.json").write_text(json.dumps(raw, indent=1))
    seconds = time.monotonic() - started
    names = [TRAINED, REFUSED, CONSTRUCTION, OTHERS, FAULT]
    what = "Each that the check lets pass is trained by two workers with `allennlp train`."
    if arguments.tries:
        names = [TRAINED, CHECKED, TRIED, MISSED, FAULT]
        what = (
            "Each is judged by `allennlp deepspeed check --try`, and one that passes is trained by "
            "two workers with `allennlp train`: it trains, or it was missed."
        )
    text = f"""# Configs changed at random

{len(judged)} changes, drawn with seed {arguments.seed}, of {len(recipes.NAMES)} configs: the \
recipes, the tests' and {len(recipes.PASTED)} DeepSpeed configurations as they are pasted. {what}

{_table(judged, names)}

`python -m tests.fuzz --cases {arguments.cases} --seed {arguments.seed}\
{" --try" if arguments.tries else ""}`, in {seconds / 60:.0f} minutes on {platform.machine()} with \
Python {platform.python_version()}.
"""
    (_RESULTS / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
