"""
Counts the bytes of model states that a rank really holds, from the tensors that are alive.
"""

import gc
import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple

import torch
import torch.distributed as dist
from allennlp.common import cached_transformers
from allennlp.training.callbacks import TrainerCallback
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed

_STEPS_BEFORE = 3


class CountedStates(NamedTuple):
    """
    Bytes on one rank.

    # Parameters

    weights : `int`
        What the forward pass computes with, without what is gathered for it.
    gradients : `int`
        The most at a time in the backward pass: all that is neither weights nor optimizer states,
        DeepSpeed's buffers included.
    gradients_in_step : `int`
        The same in the optimizer's step, without what the optimizer allocates for a moment.
    optimizer : `int`
        The optimizer's states, and the fp32 weights that it steps if they aren't `weights`.
    """

    weights: int
    gradients: int
    gradients_in_step: int
    optimizer: int

    @classmethod
    def read(cls, serialization_dir: Path) -> List["CountedStates"]:
        """What each rank has counted."""
        paths = sorted(serialization_dir.glob("counted_states_*.json"))
        return [cls(**json.loads(path.read_text())) for path in paths]


@TrainerCallback.register("count_model_states")
class CountModelStates(TrainerCallback):
    """
    Counts the model states of each rank in the fourth optimizer step, when those of the optimizer
    are there, and DeepSpeed has recorded in which order to gather parameters at stage 3. What
    Python had before training must be out of its sight, by `gc.freeze()`. Activations count as
    gradients: batches are to be tiny.
    """

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._is_counting = False
        self._in_backward: List[int] = []
        self._in_step: List[int] = []

    @override
    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary, **kwargs)
        # AllenNLP keeps the model that embedders have copied, in CPU memory.
        cached_transformers._clear_caches()
        step = DeepSpeedEngine.step

        def counted_step(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
            self._count_into(self._in_backward)
            with _Allocations(lambda: self._count_into(self._in_step)) as allocations:
                before = trainer.optimizer.register_step_pre_hook(lambda *_: allocations.pause())
                after = trainer.optimizer.register_step_post_hook(lambda *_: allocations.resume())
                step(engine, *args, **kwargs)
            before.remove()
            after.remove()

        # The attribute of the engine refuses any call. Each training has its own processes.
        DeepSpeedEngine.step = counted_step

    @override
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
        if self._is_counting:
            states = CountedStates(
                weights=_bytes(self._weights()),
                gradients=max(self._in_backward),
                gradients_in_step=max(self._in_step),
                optimizer=_bytes(self._optimizer()),
            )
            path = Path(self.serialization_dir) / f"counted_states_{dist.get_rank()}.json"
            path.write_text(json.dumps(states._asdict()))
        self._is_counting = is_training and batch_number == _STEPS_BEFORE
        if self._is_counting:
            # Only now, so that they run after those by which the trainer reduces gradients.
            for parameter in filter(lambda p: p.requires_grad, trainer.model.parameters()):
                parameter.register_post_accumulate_grad_hook(
                    lambda _: self._count_into(self._in_backward)
                )

    def _count_into(self, counts: List[int]) -> None:
        if not self._is_counting:
            return
        parameters = list(self.trainer.model.parameters())
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        # Autograd holds these itself, where Python doesn't see them.
        tensors += [p.grad for p in parameters if p.grad is not None]
        states = {**self._weights(), **self._optimizer(), **_storages(self.trainer.model.buffers())}
        with access_allowed():
            counts.append(_bytes(_without(_storages(tensors), states)))

    def _weights(self) -> Dict[int, torch.UntypedStorage]:
        parameters = list(self.trainer.model.parameters())
        # At stage 3 a parameter is empty, unless DeepSpeed keeps it whole, and `ds_tensor` its
        # shard.
        shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        with access_allowed():
            return _storages([*(p.data for p in parameters), *shards])

    def _optimizer(self) -> Dict[int, torch.UntypedStorage]:
        tensors = []
        for parameter, state in self.trainer.optimizer.state.items():
            tensors += [parameter.data, *filter(torch.is_tensor, state.values())]
        return _without(_storages(tensors), self._weights())


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
        if not self._is_paused and torch.is_tensor(result):
            inputs = _storages(x for x in tree_leaves([args, kwargs]) if torch.is_tensor(x))
            if _bytes(_without(_storages([result]), inputs)) >= self.min_bytes:
                self._function()
        return result


def _storages(tensors: Iterable[torch.Tensor]) -> Dict[int, torch.UntypedStorage]:
    """By their address, which is unique as long as they are alive."""
    storages = (t.untyped_storage() for t in tensors if t.device.type != "meta")
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}


def _without(
    storages: Dict[int, torch.UntypedStorage], others: Dict[int, torch.UntypedStorage]
) -> Dict[int, torch.UntypedStorage]:
    return {key: storages[key] for key in storages.keys() - others.keys()}


def _bytes(storages: Dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())
