"""
Tries mutations, in a copy of the repository that `python -m evidence mutations` has made and is the
working directory. Everything is imported once. A process for each mutation is forked from this
one: in it and in its file the package is wrong, and pytest runs.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, List, Optional, Sequence, Tuple

import psutil
import pytest

from evidence.mutations.mutations import (
    FAILED,
    HUNG,
    MUTATIONS,
    OUTCOME,
    PASSED,
    Mutation,
)
from tests.support import preload  # noqa: F401

PACKAGE = "allennlp_deepspeed"
TIME_LIMIT = 300
"""Seconds for the tests of a mutation."""


_fork = multiprocessing.get_context("fork")


def run_tests(
    tests: Sequence[str], time_limit: float, mutation: Optional[Mutation] = None
) -> Tuple[str, str]:
    """Returns whether a test has failed, and what pytest has printed."""
    log = Path("log.txt").resolve()
    process = _fork.Process(target=_pytest, args=(tests, log, mutation))
    process.start()
    process.join(time_limit)
    outcome = {None: HUNG, pytest.ExitCode.OK: PASSED, pytest.ExitCode.TESTS_FAILED: FAILED}.get(
        process.exitcode  # type: ignore[arg-type]
    )
    _kill(process)
    output = log.read_text(errors="replace")
    if outcome is None:
        sys.exit(f"pytest ended with exit code {process.exitcode}:\n{output}")
    return outcome, output


def _pytest(tests: Sequence[str], log: Path, mutation: Optional[Mutation]) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if mutation is not None:
        mutate(mutation)
    options = ["-n", "0", "-x", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def mutate(mutation: Mutation) -> None:
    """
    Replaces the code of the functions of the mutation's file. Commands that tests start import the
    file.
    """
    path = Path(PACKAGE, mutation.file).resolve()
    before, after = (
        _functions_in(compile(text, str(path), "exec"))
        for text in (path.read_text(), _mutated(mutation))
    )
    new_codes = dict(zip(map(_place, before), after, strict=True))
    functions = [f for f in gc.get_objects() if isinstance(f, FunctionType)]
    for function in functions:
        if Path(function.__code__.co_filename) == path:
            place = _place(function.__code__)
            function.__code__ = new_codes.get(place, function.__code__)
    path.write_text(_mutated(mutation))


def _mutated(mutation: Mutation) -> str:
    return Path(PACKAGE, mutation.file).read_text().replace(mutation.old, mutation.new)


def _functions_in(code: CodeType) -> List[CodeType]:
    """Returns the code of the functions of a module and of its classes, in order."""
    codes: List[CodeType] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_function = constant.co_flags & 1  # has fast locals, unlike the body of a class
            codes += [constant] if is_function else _functions_in(constant)
    return codes


def _place(code: CodeType) -> Tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _kill(process: Any) -> None:
    """Ends a process, and those that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for each in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.join()


def try_mutation(mutation: Mutation) -> Tuple[str, str]:
    path = Path(PACKAGE, mutation.file)
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        return f"**no**: the file has the text {count} times", ""
    try:
        return run_tests(mutation.tests, TIME_LIMIT, mutation)
    finally:
        path.write_text(text)


def main() -> None:
    numbers = list(map(int, sys.argv[1:]))
    tests = list(dict.fromkeys(test for n in numbers for test in MUTATIONS[n - 1].tests))
    outcome, output = run_tests(tests, TIME_LIMIT * len(numbers))
    if outcome != PASSED:
        sys.exit(f"Tests fail without a mutation:\n{output}")
    for number in numbers:
        outcome, output = try_mutation(MUTATIONS[number - 1])
        reasons = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(OUTCOME + json.dumps([number, outcome, *reasons]), flush=True)


if __name__ == "__main__":
    main()
