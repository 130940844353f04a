from typing import NamedTuple

import torch

from allennlp_deepspeed.engine import agreement


class StepAgreement(NamedTuple):
    """
    What some ranks knew of the steps since the agreement before, and now all do.

    # Parameters

    steps_since_nan : `int`
        From the first step with a loss of NaN on any rank on; 0 if there was none.
    ranks_differ : `bool`
        Whether they reduced gradients of different parameters.
    signal_number : `int`
        The greatest of all ranks, 0 if none has received a signal.
    is_time_to_save : `bool`
        Whether it is by the clock of rank 0.
    has_changed_weights : `bool`
        Whether weights have been changed outside the optimizer on any rank.
    seconds_per_step : `float`
        On the slowest rank.
    """

    steps_since_nan: int
    ranks_differ: bool
    signal_number: int
    is_time_to_save: bool
    has_changed_weights: bool
    seconds_per_step: float


def agree_on_steps(
    device: torch.device,
    steps_since_nan: int,
    used_parameters_checksum: int,
    signal_number: int,
    is_time_to_save: bool,
    has_changed_weights: bool,
    seconds_per_step: float,
) -> StepAgreement:
    """
    Makes known to all ranks what each knows, in one collective, of 56 bytes. To be called by every
    rank. Waits for the device.

    # Parameters

    device : `torch.device`, required.
        Where the process group communicates.
    used_parameters_checksum : `int`, required.
        Of 32 bits.

    The others are those of `StepAgreement`, on this rank.
    """
    # One maximum over the ranks: that of the checksum and of its negative are the largest and the
    # smallest.
    since_nan, largest, smallest, signal_, is_time, weights, seconds = agreement.highest(
        [
            float(steps_since_nan),
            float(used_parameters_checksum),
            -float(used_parameters_checksum),
            float(signal_number),
            float(is_time_to_save),
            float(has_changed_weights),
            seconds_per_step,
        ],
        device,
        dtype=torch.float64,
    )
    return StepAgreement(
        steps_since_nan=int(since_nan),
        ranks_differ=largest != -smallest,
        signal_number=int(signal_),
        is_time_to_save=bool(is_time),
        has_changed_weights=bool(weights),
        seconds_per_step=seconds,
    )
