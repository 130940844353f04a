"""After how many steps the host reads the losses."""

import pytest

from allennlp_deepspeed.training.step_metrics import ReadingPace


def test_a_fixed_pace_reads_after_so_many_steps() -> None:
    pace = ReadingPace(3)
    assert [pace.finish_step() for _ in range(3)] == [False, False, True]
    pace.finish_reading(seconds_per_step=100.0)
    assert [pace.finish_step() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("seconds_per_step, num_steps", [(2.0, 1), (0.25, 4)])
def test_by_itself_it_reads_about_once_a_second(seconds_per_step: float, num_steps: int) -> None:
    pace = ReadingPace()
    assert pace.finish_step()  # to know how long a step takes
    pace.finish_reading(seconds_per_step)
    assert [pace.finish_step() for _ in range(num_steps)] == [False] * (num_steps - 1) + [True]
