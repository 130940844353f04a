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
from tests.fuzz.trial import CONSTRUCTION, FAULT, REFUSED, TRAINED, Outcome, checked, trained

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


def _table(judged: List[Judged]) -> str:
    names = [TRAINED, REFUSED, CONSTRUCTION, FAULT]
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
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    started = time.monotonic()
    numbers = arguments.case or list(range(arguments.cases))
    with tempfile.TemporaryDirectory() as directory:
        judged = judge_all(numbers, Path(directory), arguments.seed, arguments.at_once)
    raw = [[j.number, j.recipe, j.mutation.kind, j.mutation.what, *j.outcome] for j in judged]
    if arguments.case:
        for row in raw:
            print(*row, sep="\n")
        return
    (_RESULTS / "raw").mkdir(exist_ok=True)
    (_RESULTS / "raw" / "fuzz.json").write_text(json.dumps(raw, indent=1))
    seconds = time.monotonic() - started
    text = f"""# Configs changed at random

{len(judged)} changes, drawn with seed {arguments.seed}, of {len(recipes.NAMES)} configs: the \
recipes, the tests' and {len(recipes.PASTED)} DeepSpeed configurations as they are pasted. Each \
that the check lets pass is trained by two workers with `allennlp train`.

{_table(judged)}

`python -m tests.fuzz --cases {arguments.cases} --seed {arguments.seed}`, in {seconds / 60:.0f} \
minutes on {platform.machine()} with Python {platform.python_version()}.
"""
    (_RESULTS / "fuzz.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
