from pathlib import Path

import pytest

from allennlp_deepspeed.checkpoint import shared_directories
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory


def test_those_that_see_one_another_share_a_directory(tmp_path: Path):
    key = shared_directories.new_key()
    folders = [str(tmp_path / name) for name in ("a", "b", "a", "c", "b")]
    for number, folder in enumerate(folders):
        shared_directories.write_token(folder, key, number)
        shared_directories.write_token(
            folder, shared_directories.new_key(), 7
        )  # of another training
    seen = [shared_directories.list_tokens(folder, key) for folder in folders]
    assert seen == [[0, 2], [1, 4], [0, 2], [3], [1, 4]]
    assert shared_directories.group_by_directory(seen) == [[0, 2], [1, 4], [3]]

    for number, folder in enumerate(folders):
        shared_directories.remove_token(folder, key, number)
        assert number not in shared_directories.list_tokens(folder, key)
        CheckpointDirectory(folder).clean_up()  # of what a crash has left
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize(
    "seen, groups",
    [
        ([[0], [0, 1]], [[0, 1]]),
        ([[0, 1], [1]], [[0, 1]]),
        ([[0], [1], [0, 1, 2]], [[0, 1, 2]]),
        ([[0, 2], [1], [2], [1, 3]], [[0, 2], [1, 3]]),
    ],
)
def test_a_directory_that_one_of_two_sees_late_is_shared(seen, groups):
    assert shared_directories.group_by_directory(seen) == groups
