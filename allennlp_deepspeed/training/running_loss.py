import itertools
import math
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import torch


class Losses(NamedTuple):
    """
    Losses of the epoch so far, summed over its steps, and of the last step, as AllenNLP's metrics
    need them. The `reg` values are `None` for a model without a regularizer.
    """

    train_loss: float
    train_reg_loss: Optional[float]
    batch_loss: float
    batch_reg_loss: Optional[float]


# Outputs of a model by name.
Terms = Dict[str, torch.Tensor]


class RunningLoss:
    """
    Sums the losses of an epoch, as AllenNLP does, but without synchronizing with the device after
    each micro-batch: they stay on the device until they are read.

    # Parameters

    divides_batches : `bool`, optional (default = `False`)
        Whether the micro-batches of a step are parts of one batch. Its penalty is then that of all
        micro-batches, not of the last.
    """

    # The maximum number of micro-batches with losses on the device; each takes a block of its
    # memory.
    max_unread = 1000

    def __init__(self, divides_batches: bool = False) -> None:
        self._divides_batches = divides_batches
        self.start_epoch(has_regularizer=False)

    def start_epoch(self, has_regularizer: bool) -> None:
        self._has_regularizer = has_regularizer
        self._losses = Losses(0.0, 0.0, 0.0, 0.0)
        # For each step the divided loss, the regularization loss and the other terms of each
        # micro-batch, and the number of micro-batches that divides the second.
        self._unread: List[Tuple[List[torch.Tensor], List[torch.Tensor], List[Terms], int]] = []
        self._num_unread = 0
        self._num_steps = 0
        self._nan_step = 0
        self.nan_terms: List[str] = []
        """The NaN outputs of the model in the first step with a NaN loss, such as "reg_loss"."""
        # The losses of the steps since the last call of `pop_mean`.
        self._losses_since: List[float] = []

    def start_step(self, num_accumulation_steps: int) -> None:
        """
        Starts an optimizer step.

        # Parameters

        num_accumulation_steps : `int`, required.
            The number of micro-batches that divides the regularization losses.
        """
        if self._num_unread > self.max_unread:
            self.read()
        self._unread.append(([], [], [], num_accumulation_steps))

    def add(self, batch_outputs: Dict[str, torch.Tensor], loss: torch.Tensor) -> None:
        """
        Adds the losses of one micro-batch of the step.

        # Parameters

        batch_outputs : `Dict[str, torch.Tensor]`, required.
            The outputs of the model.
        loss : `torch.Tensor`, required.
            Its loss, divided by the number of micro-batches. It must not be changed later.
        """
        losses, reg_losses, terms, _ = self._unread[-1]
        # A number, without a gradient, is refused by backward.
        losses.append(torch.as_tensor(loss).detach())
        # Copies, because the model and callbacks may change the tensors.
        if "reg_loss" in batch_outputs:
            reg_losses.append(batch_outputs["reg_loss"].detach().clone())
        terms.append(
            {
                # A view would keep all that it is a view of.
                name: value.detach().clone()
                for name, value in batch_outputs.items()
                if name.endswith("_loss") and isinstance(value, torch.Tensor) and value.dim() == 0
            }
        )
        self._num_unread += 1

    def pop_steps_since_nan(self) -> int:
        """
        Returns the number of steps from the first with a NaN loss to now, among those since the
        last call; 0 if there was none. It synchronizes with the device.
        """
        self.read()
        num_steps, self._num_steps = self._num_steps, 0
        nan_step, self._nan_step = self._nan_step, 0
        return num_steps + 1 - nan_step if nan_step else 0

    def pop_mean(self) -> float:
        """
        Returns the mean loss of the steps since the last call, NaN if there was none. It
        synchronizes with the device.
        """
        self.read()
        losses, self._losses_since = self._losses_since, []
        return sum(losses) / len(losses) if losses else math.nan

    def state_dict(self) -> Dict[str, float]:
        """Returns the losses of the epoch so far. It synchronizes with the device."""
        losses = self.read()
        return {"train_loss": losses.train_loss, "reg_loss": losses.train_reg_loss or 0.0}

    def load_state_dict(self, state_dict: Dict[str, float]) -> None:
        self._losses = self._losses._replace(
            train_loss=float(state_dict["train_loss"]), train_reg_loss=float(state_dict["reg_loss"])
        )

    def read(self) -> Losses:
        """Returns the losses, synchronizing with the device."""
        unread = [
            loss
            for losses, reg_losses, _, _ in self._unread
            for loss in itertools.chain(losses, reg_losses)
        ]
        if unread:
            values = iter(torch.cat([loss.reshape(1) for loss in unread]).tolist())
            for losses, reg_losses, terms, num_accumulation_steps in self._unread:
                had_nan = self._nan_step > 0
                self._add_step(
                    [next(values) for _ in losses],
                    [next(values) for _ in reg_losses],
                    num_accumulation_steps,
                )
                if self._nan_step and not had_nan:
                    self.nan_terms = sorted(_names_of_nan(terms))
        self._unread.clear()
        self._num_unread = 0
        if not self._has_regularizer:
            return self._losses._replace(train_reg_loss=None, batch_reg_loss=None)
        return self._losses

    def _add_step(
        self, losses: List[float], reg_losses: List[float], num_accumulation_steps: int
    ) -> None:
        # In AllenNLP's order.
        train_loss, train_reg_loss, _, batch_reg_loss = self._losses
        batch_loss = 0.0
        for loss in losses:
            batch_loss += loss
        for reg_loss in reg_losses:
            batch_reg_loss = reg_loss / num_accumulation_steps
            train_reg_loss += batch_reg_loss  # type: ignore[operator]
        if self._divides_batches:
            batch_reg_loss = sum(reg_losses) / num_accumulation_steps
        self._losses = Losses(train_loss + batch_loss, train_reg_loss, batch_loss, batch_reg_loss)
        self._num_steps += 1
        self._losses_since.append(batch_loss)
        if math.isnan(batch_loss) and not self._nan_step:
            self._nan_step = self._num_steps


def _names_of_nan(of_micro_batches: List[Terms]) -> Set[str]:
    return {
        name
        for terms in of_micro_batches
        for name, value in terms.items()
        if math.isnan(value.item())
    }
