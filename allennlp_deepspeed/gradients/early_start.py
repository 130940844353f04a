from typing import Any, Dict, Iterable, List

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from allennlp_deepspeed.engine.shard_exchange import ShardExchange


class EarlyStart:
    """
    Has the sums of gradients begin before DeepSpeed is given these, over networks that take long.

    Where DeepSpeed is given them only after the last backward pass of a step, `come` starts them
    from inside it: in one order on all ranks, each as soon as it and those before it are there. One
    that the pass has no use for holds up those after it until the pass is done, when `start_rest`
    starts them all, before DeepSpeed is given any. So the order, and what goes together, are the
    same for ranks that use different parameters.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    exchange : `ShardExchange`, required.
        Which `starts_early`.
    parameters : `List[torch.nn.Parameter]`, required.
        In the order in which DeepSpeed is given their gradients.
    group_indices : `Dict[torch.nn.Parameter, int]`, required.
        In which group DeepSpeed has each.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        exchange: ShardExchange,
        parameters: List[torch.nn.Parameter],
        group_indices: Dict[torch.nn.Parameter, int],
    ) -> None:
        self._engine = engine
        self._optimizer: Any = engine.optimizer
        self._exchange = exchange
        self._parameters = parameters
        self._group_indices = group_indices
        self._has_come = [False] * len(parameters)
        self._next = 0
        self.is_open = False
        """Whether gradients of the engine's backward pass are final when they come."""

    def start_micro_batch(self) -> None:
        self._has_come = [False] * len(self._parameters)
        self._next = 0

    def come(self, index: int, _: torch.nn.Parameter) -> None:
        """
        Starts the gradient that has come, and those that have waited for it.

        # Raises

        `RuntimeError`
            If it has come before in this micro-batch, and was started.
        """
        # A model may go backward by itself in its forward pass.
        if not (self.is_open and self._engine._running_engine_backward):
            return
        if index < self._next:
            raise RuntimeError(
                "The gradient of a parameter has come twice in the backward pass of a micro-batch, "
                "and was sent to the other workers the first time. Write 'trainer.reduce_within': "
                "null, which sends all when the pass is done."
            )
        self._has_come[index] = True
        while self._next < len(self._parameters) and self._has_come[self._next]:
            self.start(self._next)
            self._next += 1

    def start_rest(self, indices: Iterable[int]) -> None:
        """Starts those of the gradients that `come` hasn't. They come to DeepSpeed after that."""
        for index in indices:
            if index >= self._next:
                self.start(index)
        self._exchange.send_waiting()

    def start(self, index: int) -> None:
        """Starts one gradient. Every rank must do so in the same order."""
        parameter = self._parameters[index]
        if self._optimizer.use_grad_accum_attribute:
            self._optimizer._fill_param_grad_accum_attribute(parameter)
        self._exchange.start(parameter, self._group_indices[parameter])

    def raise_if_unfinished(self) -> None:
        """
        # Raises

        `RuntimeError`
            If a step has ended while gradients were on their way.
        """
        if not self._exchange.is_idle:
            raise RuntimeError(
                "A step has failed while its gradients were on their way to the other workers, and "
                "no other can follow it: construct the trainer anew, or write "
                "'trainer.reduce_within': null, which sends them when the backward pass is done."
            )
