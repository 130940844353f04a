"""Steps after which the host reads the losses."""

import pytest

from allennlp_deepspeed.training.step_metrics import SynchronizationInterval


def test_a_fixed_interval_logs_after_that_number_of_steps() -> None:
    interval = SynchronizationInterval(3)
    assert [interval.finish_step() for _ in range(3)] == [False, False, True]
    interval.set_next_length(100.0)
    interval.start_next()
    assert [interval.finish_step() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("seconds_per_step, num_steps", [(2.0, 1), (0.25, 4)])
def test_the_default_interval_is_about_a_second(seconds_per_step: float, num_steps: int) -> None:
    interval = SynchronizationInterval()
    assert interval.finish_step()  # to know how long a step takes
    interval.set_next_length(seconds_per_step)
    interval.start_next()
    assert [interval.finish_step() for _ in range(num_steps)] == [False] * (num_steps - 1) + [True]
