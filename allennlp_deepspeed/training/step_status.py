from typing import NamedTuple

import torch

from allennlp_deepspeed.engine.process import collectives


class StepStatus(NamedTuple):
    """
    State of the steps since the previous all-reduce, the same on all ranks.

    # Parameters

    steps_since_nan : `int`
        The number of steps from the first with a NaN loss on any rank to now; 0 if there was none.
    ranks_differ : `bool`
        Whether the ranks reduced gradients of different parameters.
    signal_number : `int`
        The maximum over all ranks, 0 if none has received a signal.
    has_non_finite_gradients : `bool`
        Whether gradients were NaN or infinite on any rank, although no loss was.
    is_time_to_save : `bool`
        Whether a checkpoint is due by the clock of rank 0.
    has_changed_weights : `bool`
        Whether weights have been changed outside the optimizer on any rank.
    seconds_per_step : `float`
        The seconds per step of the slowest rank.
    """

    steps_since_nan: int
    ranks_differ: bool
    signal_number: int
    has_non_finite_gradients: bool
    is_time_to_save: bool
    has_changed_weights: bool
    seconds_per_step: float


def all_reduce_status(
    device: torch.device,
    steps_since_nan: int,
    used_parameters_checksum: int,
    signal_number: int,
    has_non_finite_gradients: bool,
    is_time_to_save: bool,
    has_changed_weights: bool,
    seconds_per_step: float,
) -> StepStatus:
    """
    Exchanges the ranks' information on the steps in one collective of 64 bytes. Every rank must
    call it. It synchronizes with the device.

    # Parameters

    device : `torch.device`, required.
        The device that the process group communicates on.
    used_parameters_checksum : `int`, required.
        A checksum of 32 bits.

    The others are those of `StepStatus`, on this rank.
    """
    values = (steps_since_nan, signal_number)
    flags = (has_non_finite_gradients, is_time_to_save, has_changed_weights)
    # One maximum over the ranks: those of a checksum and of its negative are the maximum and the
    # minimum.
    extremes = (used_parameters_checksum, -used_parameters_checksum)
    numbers = list(map(float, (seconds_per_step, *values, *flags, *extremes)))
    maxima = collectives.all_reduce_max(numbers, device, dtype=torch.float64)
    seconds, since_nan, signal_, is_non_finite, is_time, has_changed, largest, smallest = maxima
    return StepStatus(
        steps_since_nan=int(since_nan),
        ranks_differ=largest != -smallest,
        signal_number=int(signal_),
        has_non_finite_gradients=bool(is_non_finite),
        is_time_to_save=bool(is_time),
        has_changed_weights=bool(has_changed),
        seconds_per_step=seconds,
    )
