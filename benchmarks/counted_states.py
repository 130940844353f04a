"""
Counts the bytes of model states that a rank really holds, from the tensors that are alive.
"""

import gc
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

import torch
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedStates(NamedTuple):
    """
    Bytes on one rank.

    # Parameters

    weights : `int`
        What the forward pass computes with, without what is gathered for it.
    gradients : `int`
        The most that there is at a time, besides weights and optimizer states, from the first
        gradient to the optimizer's step: gradients wherever they are, and DeepSpeed's buffers for
        them.
    gradients_in_step : `int`
        The same while the optimizer steps.
    optimizer : `int`
        The optimizer's states, and the fp32 weights that it steps if they aren't `weights`.
    """

    weights: int
    gradients: int
    gradients_in_step: int
    optimizer: int


class StatesCounter(TrainerCallback):
    """
    Counts the model states in the second optimizer step, when the states of the optimizer are
    there. To be constructed before the engine is. Activations count as gradients: batches are to be
    tiny.

    # Attributes

    states : `CountedStates`
        Once that step is done.
    """

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self.states: Optional[CountedStates] = None
        self._in_backward: List[int] = []
        self._in_step: List[int] = []

    @overrides
    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary, **kwargs)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _: self._in_backward.append(self._count_gradients())
                )
        step = trainer.engine.step

        def counted_step(*args: Any, **kwargs: Any) -> None:
            self._in_backward.append(self._count_gradients())
            with _Allocations(lambda: self._in_step.append(self._count_gradients())) as allocations:
                # What the optimizer allocates for a moment is no state.
                before = trainer.optimizer.register_step_pre_hook(
                    lambda *_: allocations.pause(),
                )
                after = trainer.optimizer.register_step_post_hook(lambda *_: allocations.resume())
                step(*args, **kwargs)
            before.remove()
            after.remove()

        trainer.engine.step = counted_step

    @overrides
    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        batch_metrics: Dict[str, Any],
        epoch: int,
        batch_number: int,
        is_training: bool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_training and batch_number == 2:
            self.states = CountedStates(
                weights=_bytes(self._weights()),
                gradients=max(self._in_backward),
                gradients_in_step=max(self._in_step),
                optimizer=_bytes(self._optimizer()),
            )
        self._in_backward, self._in_step = [], []

    def _count_gradients(self) -> int:
        parameters = list(self.trainer.model.parameters())
        # Autograd holds these itself, where the collector doesn't see them.
        gradients = [p.grad for p in parameters if p.grad is not None]
        storages = _storages([*_listed_tensors(), *gradients])
        states = {**self._weights(), **self._optimizer(), **_storages(self.trainer.model.buffers())}
        return _bytes({key: storages[key] for key in storages.keys() - states.keys()})

    def _weights(self) -> Dict[int, torch.UntypedStorage]:
        parameters = list(self.trainer.model.parameters())
        # At stage 3 a parameter is empty, unless DeepSpeed keeps it whole, and `ds_tensor` its
        # shard.
        shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        return _storages([*(p.data for p in parameters), *shards])

    def _optimizer(self) -> Dict[int, torch.UntypedStorage]:
        tensors = []
        for parameter, state in self.trainer.optimizer.state.items():
            tensors += [parameter.data, *filter(torch.is_tensor, state.values())]
        storages, weights = _storages(tensors), self._weights()
        return {key: storages[key] for key in storages.keys() - weights.keys()}


class _Allocations(TorchDispatchMode):
    """Calls a function after each operation that has allocated something worth counting."""

    min_bytes = 100_000

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._function = function
        self._is_paused = False

    def pause(self) -> None:
        self._function()
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not self._is_paused and isinstance(result, torch.Tensor):
            inputs = {
                x.untyped_storage().data_ptr()
                for x in tree_leaves([args, kwargs])
                if isinstance(x, torch.Tensor)
            }
            storage = result.untyped_storage()
            if storage.nbytes() >= self.min_bytes and storage.data_ptr() not in inputs:
                self._function()
        return result


def _listed_tensors() -> Iterable[torch.Tensor]:
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> Dict[int, torch.UntypedStorage]:
    storages = (t.untyped_storage() for t in tensors if t.device.type != "meta")
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}


def _bytes(storages: Dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())
