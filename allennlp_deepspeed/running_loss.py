from typing import Dict, NamedTuple, Optional

import torch
import torch.distributed as dist


class Losses(NamedTuple):
    """
    Losses of the epoch so far, summed over its steps, and of the last group of micro-batches, as
    AllenNLP's metrics want them. The `reg` values are `None` for a model without a regularizer.
    """

    train_loss: float
    train_reg_loss: Optional[float]
    batch_loss: float
    batch_reg_loss: Optional[float]


class Agreement(NamedTuple):
    """
    What some ranks knew, and now all do.

    # Parameters

    nan_step : `int`
        The first step with a loss of NaN on any rank, counted from 1 after the agreement before; 0
        if there was none.
    ranks_differ : `bool`
        Whether they had different checksums.
    signal_number : `int`
        The greatest of all ranks.
    is_time_to_save : `bool`
        Whether it is on any rank.
    seconds_per_step : `float`
        On the slowest rank.
    """

    nan_step: int
    ranks_differ: bool
    signal_number: int
    is_time_to_save: bool
    seconds_per_step: float


class RunningLoss:
    """
    Sums the losses of an epoch on the device, in the order in which AllenNLP sums them on the host,
    and in its precision. The host waits for the device in `agree` and in `read` only.

    # Parameters

    device : `torch.device`, required.
    has_regularizer : `bool`, required.
    """

    def __init__(self, device: torch.device, has_regularizer: bool) -> None:
        self._device = device
        self._has_regularizer = has_regularizer
        # AllenNLP adds Python floats, which are float64.
        self._train_loss, self._train_reg_loss, self._batch_loss, self._batch_reg_loss = (
            torch.zeros(4, dtype=torch.float64, device=device).unbind()
        )
        self._num_steps = 0
        # Since the sum became NaN, which it then stays.
        self._num_nan_steps = torch.zeros((), dtype=torch.float64, device=device)

    def start_group(self) -> None:
        self._batch_loss.zero_()

    def add(self, batch_outputs: Dict[str, torch.Tensor], group_size: int) -> None:
        """Adds the losses of one micro-batch of a group of `group_size`."""
        self._batch_loss.add_(batch_outputs["loss"].detach() / group_size)
        if "reg_loss" in batch_outputs:
            self._batch_reg_loss.copy_(batch_outputs["reg_loss"].detach() / group_size)
            self._train_reg_loss.add_(self._batch_reg_loss)

    def finish_group(self) -> None:
        self._train_loss.add_(self._batch_loss)
        self._num_nan_steps.add_(self._train_loss.isnan())
        self._num_steps += 1

    def agree(
        self, checksum: int, signal_number: int, is_time_to_save: bool, seconds_per_step: float
    ) -> Agreement:
        """
        Makes known to all ranks what each knows of the steps since the last agreement. Waits for
        the device. To be called by every rank.

        # Parameters

        checksum : `int`, required.
            Of 32 bits.
        signal_number : `int`, required.
            Of the signal that this rank has received, or 0.
        is_time_to_save : `bool`, required.
        seconds_per_step : `float`, required.
        """
        # The negative checksum as well, so that one maximum over the ranks gives both the largest
        # and the smallest.
        known_by_host = [checksum, -checksum, signal_number, is_time_to_save, seconds_per_step]
        flags = torch.tensor([0.0, *known_by_host], dtype=torch.float64, device=self._device)
        flags[0] = self._num_nan_steps
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        num_nan_steps, largest, smallest, signal_, is_time, seconds = flags.tolist()
        num_steps, self._num_steps = self._num_steps, 0
        return Agreement(
            nan_step=num_steps - int(num_nan_steps) + 1 if num_nan_steps else 0,
            ranks_differ=largest != -smallest,
            signal_number=int(signal_),
            is_time_to_save=bool(is_time),
            seconds_per_step=seconds,
        )

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """The losses of the epoch so far."""
        return {"train_loss": self._train_loss.clone(), "reg_loss": self._train_reg_loss.clone()}

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor]) -> None:
        self._train_loss.copy_(state_dict["train_loss"])
        self._train_reg_loss.copy_(state_dict["reg_loss"])

    def read(self) -> Losses:
        """Waits for the device and returns the losses."""
        train_loss, train_reg_loss, batch_loss, batch_reg_loss = torch.stack(
            [self._train_loss, self._train_reg_loss, self._batch_loss, self._batch_reg_loss]
        ).tolist()
        if not self._has_regularizer:
            train_reg_loss = batch_reg_loss = None
        return Losses(train_loss, train_reg_loss, batch_loss, batch_reg_loss)
