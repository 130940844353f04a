"""What a worker shows of itself to the process that watches it."""

from typing import Iterator

import pytest

from allennlp_deepspeed.processes import activity
from allennlp_deepspeed.processes.activity import NOT_WATCHED, SAVING, TRAINING, VALIDATION, Board


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    board = Board(2)
    monkeypatch.setattr(activity, "_board", board)
    monkeypatch.setattr(activity, "_index", 1)
    return board


def test_a_worker_begins_with_what_takes_its_time(board: Board) -> None:
    assert board.read(1).phase == NOT_WATCHED
    assert not board.read(1).is_watched


def test_each_worker_writes_its_own(board: Board) -> None:
    before = board.read(0)
    activity.at(TRAINING, 2, 7)
    assert board.read(1)[:3] == (TRAINING, 2, 7)
    assert board.read(1).is_watched
    assert board.read(0) == before


def test_progress_changes_the_time_only(board: Board) -> None:
    activity.at(TRAINING, 2, 7)
    board.write(1, board.read(1)._replace(time=0.0))
    activity.go_on()
    assert board.read(1)[:3] == (TRAINING, 2, 7)
    assert board.read(1).time > 0


def test_batches_of_a_validation_are_counted_from_its_first(board: Board) -> None:
    activity.at(NOT_WATCHED, 3)
    for _ in range(2):
        activity.validate()
    assert board.read(1)[:3] == (VALIDATION, 3, 2)


def test_after_saving_it_does_what_it_has_done_before(board: Board) -> None:
    activity.at(TRAINING, 2, 7)
    with pytest.raises(OSError), activity.saving():
        assert board.read(1).phase == SAVING
        raise OSError("disk full")
    assert board.read(1)[:3] == (TRAINING, 2, 7)


def test_a_process_that_nobody_watches_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_board", None)
    activity.at(TRAINING)
    activity.go_on()
    activity.validate()
    with activity.saving():
        pass
