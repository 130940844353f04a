import itertools
import math
from typing import Dict, List, NamedTuple, Optional, Tuple

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
    has_changed_weights : `bool`
        Whether weights have been changed outside the optimizer on any rank.
    seconds_per_step : `float`
        On the slowest rank.
    """

    nan_step: int
    ranks_differ: bool
    signal_number: int
    is_time_to_save: bool
    has_changed_weights: bool
    seconds_per_step: float


class RunningLoss:
    """
    Sums the losses of an epoch, as AllenNLP does, but without waiting for the device after each
    micro-batch: they stay there until somebody wants to know.

    # Parameters

    device : `torch.device`, required.
    has_regularizer : `bool`, required.
    """

    # Micro-batches whose losses may stay on the device; each takes a block of its memory.
    most_unread = 1000

    def __init__(self, device: torch.device, has_regularizer: bool) -> None:
        self._device = device
        self._has_regularizer = has_regularizer
        self._losses = Losses(0.0, 0.0, 0.0, 0.0)
        # For each group the loss and the regularization loss of each micro-batch, and the group's
        # size.
        self._unread: List[Tuple[List[torch.Tensor], List[torch.Tensor], int]] = []
        self._num_unread = 0
        self._num_steps = 0
        self._nan_step = 0

    def start_group(self, size: int) -> None:
        """
        # Parameters

        size : `int`, required.
            The number of micro-batches by which the losses are divided.
        """
        if self._num_unread > self.most_unread:
            self.read()
        self._unread.append(([], [], size))

    def add(self, batch_outputs: Dict[str, torch.Tensor]) -> None:
        """Adds the losses of one micro-batch of the group."""
        losses, reg_losses, _ = self._unread[-1]
        # Copies, because the tensors are the model's and the callbacks' to change.
        losses.append(batch_outputs["loss"].detach().clone())
        if "reg_loss" in batch_outputs:
            reg_losses.append(batch_outputs["reg_loss"].detach().clone())
        self._num_unread += 1

    def agree(
        self,
        checksum: int,
        signal_number: int,
        is_time_to_save: bool,
        has_changed_weights: bool,
        seconds_per_step: float,
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
        has_changed_weights : `bool`, required.
        seconds_per_step : `float`, required.
        """
        self.read()
        num_steps, self._num_steps = self._num_steps, 0
        nan_step, self._nan_step = self._nan_step, 0
        # One maximum over the ranks: of the steps from the first NaN on, and of the checksum and
        # its negative, which gives the largest and the smallest.
        flags = torch.tensor(
            [
                num_steps + 1 - nan_step if nan_step else 0,
                checksum,
                -checksum,
                signal_number,
                is_time_to_save,
                has_changed_weights,
                seconds_per_step,
            ],
            dtype=torch.float64,
            device=self._device,
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        since_nan, largest, smallest, signal_, is_time, weights, seconds = flags.tolist()
        return Agreement(
            nan_step=num_steps + 1 - int(since_nan) if since_nan else 0,
            ranks_differ=largest != -smallest,
            signal_number=int(signal_),
            is_time_to_save=bool(is_time),
            has_changed_weights=bool(weights),
            seconds_per_step=seconds,
        )

    def state_dict(self) -> Dict[str, float]:
        """The losses of the epoch so far. Waits for the device."""
        losses = self.read()
        return {"train_loss": losses.train_loss, "reg_loss": losses.train_reg_loss or 0.0}

    def load_state_dict(self, state_dict: Dict[str, float]) -> None:
        self._losses = self._losses._replace(
            train_loss=float(state_dict["train_loss"]), train_reg_loss=float(state_dict["reg_loss"])
        )

    def read(self) -> Losses:
        """Waits for the device and returns the losses."""
        unread = [
            loss
            for losses, reg_losses, _ in self._unread
            for loss in itertools.chain(losses, reg_losses)
        ]
        if unread:
            values = iter(torch.cat([loss.reshape(1) for loss in unread]).tolist())
            for losses, reg_losses, size in self._unread:
                self._add_group(
                    [next(values) for _ in losses], [next(values) for _ in reg_losses], size
                )
        self._unread.clear()
        self._num_unread = 0
        if not self._has_regularizer:
            return self._losses._replace(train_reg_loss=None, batch_reg_loss=None)
        return self._losses

    def _add_group(self, losses: List[float], reg_losses: List[float], size: int) -> None:
        # In AllenNLP's order, so that only the rounding of the division is another.
        train_loss, train_reg_loss, _, batch_reg_loss = self._losses
        batch_loss = 0.0
        for loss in losses:
            batch_loss += loss / size
        for reg_loss in reg_losses:
            batch_reg_loss = reg_loss / size
            train_reg_loss += batch_reg_loss  # type: ignore[operator]
        self._losses = Losses(train_loss + batch_loss, train_reg_loss, batch_loss, batch_reg_loss)
        self._num_steps += 1
        if math.isnan(batch_loss) and not self._nan_step:
            self._nan_step = self._num_steps
