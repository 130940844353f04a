from typing import Any, Dict, List

import torch


class StepRecord:
    """
    Keeps what an optimizer step takes with it: the gradients, which DeepSpeed clears, and by how
    much the weights change. It keeps them of the tensors that the optimizer steps, so that a rank
    has no more than its shards of them, and only of the steps that it is told to.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        The one inside DeepSpeed's, which may step a part of the tensors at a time. Just before it
        does, their gradients are reduced, unscaled and clipped at every ZeRO stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients: Dict[torch.Tensor, torch.Tensor] = {}
        self.updates: Dict[torch.Tensor, torch.Tensor] = {}
        self._keeps_gradients = False
        self._keeps_updates = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def start(self, gradients: bool, updates: bool) -> None:
        """
        To be called before each step.

        # Parameters

        gradients : `bool`, required.
            Whether to keep the gradients, until `clear`.
        updates : `bool`, required.
            Whether to keep the weights before the step less those after it.
        """
        self._keeps_gradients = gradients
        self._keeps_updates = updates

    def clear(self) -> None:
        self.gradients.clear()
        self.updates.clear()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for tensor in _stepped(optimizer):
            if self._keeps_gradients and tensor.grad is not None:
                self.gradients[tensor] = tensor.grad.detach().clone()
            if self._keeps_updates:
                self.updates[tensor] = tensor.detach().clone()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._keeps_updates:
            for tensor in _stepped(optimizer):
                self.updates[tensor].sub_(tensor.detach())


def _stepped(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
