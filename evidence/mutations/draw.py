"""
Draws mutations with the operators of cosmic-ray, and writes them to `drawn.json`: `python -m
evidence.mutations.draw` in an environment with cosmic-ray 8.7.0, which the study itself doesn't
need. Those whose text is still in the package stay, others are drawn in the place of the rest.
"""

import ast
import json
import random
from collections import defaultdict
from itertools import islice
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from evidence import REPOSITORY
from evidence.mutations.mutations import DRAWN

SEED = 0

NUM_OF_FILE = {
    "training/gradient_step.py": 13,
    "engine/gradient_synchronizer.py": 25,
    "checkpoint/background_commit.py": 11,
    "checkpoint/checkpoint_directory.py": 11,
    "checkpoint/selection.py": 13,
    "config/resolution.py": 14,
}

# The others need arguments, or change what isn't in a function's code.
LEFT_OUT = ("VariableReplacer", "VariableInserter", "RemoveDecorator")


class Candidate(NamedTuple):
    """An operator's change of a file."""

    operator: Any
    occurrence: int
    line: int
    column: int


class Positions(Visitor):
    """Finds all places that an operator changes, in the order in which cosmic-ray counts them."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.found: List[Tuple[int, int]] = []

    def visit(self, node: Any) -> Any:
        self.found += [start for start, _ in self._operator.mutation_positions(node)]
        return node


def candidates(source: str) -> Iterator[Candidate]:
    lines = lines_of_functions(source)
    for name in operator_names():
        if name.rpartition("/")[2] in LEFT_OUT:
            continue
        operator = get_operator(name)()
        positions = Positions(operator)
        positions.walk(get_ast(source))
        for occurrence, (line, column) in enumerate(positions.found):
            if line in lines:
                yield Candidate(operator, occurrence, line, column)


def lines_of_functions(source: str) -> set:
    """Returns the lines in bodies of functions, without those that only make up a message."""
    lines: set = set()
    without: set = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                lines |= _lines(statement)
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or (
            is_call and ast.unparse(node.value.func).startswith(("logger.", "log_", "errors.add"))
        ):
            without |= _lines(node)
    return lines - without


def _lines(node: Any) -> set:
    return set(range(node.lineno, node.end_lineno + 1))


def texts(source: str, mutated: str) -> Tuple[str, str]:
    """Returns the changed lines before and after, with as many before them as make them unique."""
    old, new = source.splitlines(), mutated.splitlines()
    start = next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    same_end = next(i for i, (a, b) in enumerate(zip(reversed(old), reversed(new))) if a != b)
    while True:
        before = "\n".join(old[start : len(old) - same_end])
        after = "\n".join(new[start : len(new) - same_end])
        indentation = len(before) - len(before.lstrip())
        if source.count(before[indentation:]) == 1:
            return before[indentation:], after[indentation:]
        start -= 1


def compiles(text: str) -> bool:
    try:
        compile(text, "", "exec")
    except SyntaxError:
        return False
    return True


def draw(file: str, source: str) -> Iterator[Dict[str, Optional[str]]]:
    by_position = defaultdict(list)
    for candidate in candidates(source):
        by_position[candidate.line, candidate.column].append(candidate)
    generator = random.Random(f"{SEED}: {file}")
    positions = sorted(by_position)
    generator.shuffle(positions)
    for position in positions:
        candidate = generator.choice(by_position[position])
        mutated = mutate_code(source, candidate.operator, candidate.occurrence)
        if mutated is not None and mutated != source and compiles(mutated):
            old, new = texts(source, mutated)
            yield {"file": file, "old": old, "new": new}


def main() -> None:
    known = json.loads(DRAWN.read_text())
    drawn = []
    for file, count in NUM_OF_FILE.items():
        source = (REPOSITORY / "allennlp_deepspeed" / file).read_text()
        kept = [each for each in known if each["file"] == file and source.count(each["old"]) == 1]
        texts_of_kept = {each["new"] for each in kept}
        others = (each for each in draw(file, source) if each["new"] not in texts_of_kept)
        drawn += [*kept, *islice(others, count - len(kept))]
    DRAWN.write_text(json.dumps(drawn, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
