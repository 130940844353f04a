from typing import NamedTuple


class ScheduleUnit(NamedTuple):
    """
    The steps that schedules count where the number of instances per step has changed, because of
    another number of workers or batch size: as large as those that the run began with, so that
    lengths and states of schedules stay.

    # Parameters

    instances : `int`
        In such a step.
    instances_now : `int`
        In a step of this run.
    num_before : `int`
        The number of such steps before the change.
    global_step : `int`
        The number of steps before the change.
    """

    instances: int
    instances_now: int
    num_before: int
    global_step: int

    def steps(self, global_step: int) -> int:
        """Returns the number of such steps, rounded down."""
        new = (global_step - self.global_step) * self.instances_now // self.instances
        return self.num_before + new
