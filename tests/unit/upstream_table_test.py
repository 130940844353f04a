from evidence.upstream.table import Outcome, markdown, unexplained

OUTCOMES = [
    Outcome("a_test::test_a", "passed", ""),
    Outcome("a_test::test_b", "skipped", "needs two GPUs"),
    Outcome("a_test::test_c", "skipped", "needs the hub: bert-large-cased"),
    Outcome("a_test::test_d", "failed", "socket: NameResolutionError: example.org"),
    Outcome("a_test::test_e", "failed", "AssertionError: something\nelse"),
]
HEADING = {"machine": "", "world_size": 1, "versions": {}, "commit": "", "date": ""}


def test_a_failure_without_a_cause_is_named() -> None:
    assert unexplained(OUTCOMES) == ["a_test::test_e: AssertionError: something else"]


def test_each_test_is_counted_once() -> None:
    lines = markdown(HEADING, {"folder": OUTCOMES}).splitlines()
    row = next(line for line in lines if line.startswith("| folder | 5 "))
    tests, *counts = map(int, row.strip("| ").split(" | ")[1:])
    assert sum(counts) == tests
    assert counts == [1, 1, 2, 0, 0, 0, 0, 1]
