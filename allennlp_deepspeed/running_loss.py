from typing import Dict, NamedTuple, Optional

import torch
import torch.distributed as dist


class LossReading(NamedTuple):
    """
    Losses of the epoch so far and of the last group of micro-batches, as AllenNLP's metrics want
    them. The `reg` values are `None` for a model without a regularizer. `has_nan`,
    `ranks_differ` and `signal_number` are what `agree` has found.
    """

    has_nan: bool
    ranks_differ: bool
    signal_number: int
    train_loss: float
    train_reg_loss: Optional[float]
    batch_loss: float
    batch_reg_loss: Optional[float]


class RunningLoss:
    """
    Sums the losses of an epoch on the device, in the order and the precision in which AllenNLP sums
    them on the host. The host waits for the device once a group, in `read`.

    # Parameters

    device : `torch.device`, required.
    has_regularizer : `bool`, required.
    """

    def __init__(self, device: torch.device, has_regularizer: bool) -> None:
        self._has_regularizer = has_regularizer
        # AllenNLP adds Python floats, which are float64.
        self._train_loss, self._train_reg_loss, self._batch_loss, self._batch_reg_loss = (
            torch.zeros(4, dtype=torch.float64, device=device).unbind()
        )
        # Whether there was a NaN, a checksum, and its negative, so that one maximum over the ranks
        # gives both the largest and the smallest checksum. And the number of a signal.
        self._flags = torch.zeros(4, dtype=torch.float64, device=device)

    def start_group(self) -> None:
        self._batch_loss.zero_()
        self._batch_reg_loss.zero_()

    def add(self, batch_outputs: Dict[str, torch.Tensor], group_size: int) -> None:
        """Adds the losses of one micro-batch of a group of `group_size`."""
        loss = batch_outputs["loss"].detach()
        self._flags[0].logical_or_(torch.isnan(loss))
        self._batch_loss.add_(loss / group_size)
        if "reg_loss" in batch_outputs:
            self._batch_reg_loss.copy_(batch_outputs["reg_loss"].detach() / group_size)
            self._train_reg_loss.add_(self._batch_reg_loss)

    def finish_group(self) -> None:
        self._train_loss.add_(self._batch_loss)

    def agree(self, checksum: int, signal_number: int) -> None:
        """
        Makes known to all ranks whether a loss of any was NaN, whether they have the same checksum,
        and whether one has been told to leave. To be called by every rank.

        # Parameters

        checksum : `int`, required.
            Of 32 bits.
        signal_number : `int`, required.
            Of the signal that this rank has received, or 0. The ranks agree on the greatest.
        """
        self._flags[1] = checksum
        self._flags[2] = -checksum
        self._flags[3] = signal_number
        dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """The losses of the epoch so far."""
        return {"train_loss": self._train_loss.clone(), "reg_loss": self._train_reg_loss.clone()}

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor]) -> None:
        self._train_loss.copy_(state_dict["train_loss"])
        self._train_reg_loss.copy_(state_dict["reg_loss"])

    def read(self) -> LossReading:
        """Waits for the device and returns the losses."""
        losses = [self._train_loss, self._train_reg_loss, self._batch_loss, self._batch_reg_loss]
        has_nan, largest, smallest, signal_number, *values = torch.cat(
            [self._flags, torch.stack(losses)]
        ).tolist()
        train_loss, train_reg_loss, batch_loss, batch_reg_loss = values
        if not self._has_regularizer:
            train_reg_loss = batch_reg_loss = None
        return LossReading(
            bool(has_nan),
            largest != -smallest,
            int(signal_number),
            train_loss,
            train_reg_loss,
            batch_loss,
            batch_reg_loss,
        )
