"""
Lets AllenNLP's "tensorboard" and "wandb" callbacks see a model that DeepSpeed has sharded.
"""

import weakref
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.callbacks.log_writer import LogWriterCallback

from allennlp_deepspeed.engine import agreement, weights
from allennlp_deepspeed.engine.shards import Shards, whole_shape
from allennlp_deepspeed.reports.gathered_tensor import (
    GatheredParameter,
    GatheredTensor,
    GatheredUpdate,
)
from allennlp_deepspeed.reports.step_record import StepRecord

# What a primary may ask the other ranks for, of one parameter.
_WEIGHT, _GRADIENT, _UPDATE, _NOTHING_MORE = range(4)


class LogWriters:
    """
    Shows the trainer's `LogWriterCallback`s the parameters, gradients and learning rates that they
    would see without DeepSpeed.

    In an optimizer step of which they log any, each rank keeps its shards of them. After the step
    the callbacks get a trainer whose model has a `GatheredParameter` for each parameter. When they
    compute with one of these, the primary tells the other ranks which it is, and all gather it, so
    that a rank never holds more than one whole parameter more, and that only the callbacks decide
    what is needed. In other steps they get the trainer as it is, and nothing is kept or gathered.

    To be constructed by every rank.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
        With its callbacks and its engine.
    """

    def __init__(self, trainer: Any) -> None:
        # Not held by what leaves the callbacks as they were when it is gone.
        self._trainer_reference = weakref.ref(trainer)
        self._callbacks = [c for c in trainer.callbacks if isinstance(c, LogWriterCallback)]
        if not self._callbacks:
            return
        self._shards = Shards(trainer.engine)
        self._record = StepRecord(trainer.optimizer)
        named_parameters = list(trainer.model.named_parameters())
        self._parameters = [parameter for _, parameter in named_parameters]
        self._views = {name: self._view(i) for i, (name, _) in enumerate(named_parameters)}
        self._primaries = _ranks_of_primaries(trainer)
        # The last that was gathered, and of what: AllenNLP asks twice in a row, for a mean and a
        # standard deviation.
        self._gathered: Tuple[Optional[Tuple[int, int]], Optional[torch.Tensor]] = (None, None)
        for callback in self._callbacks:
            log_tensors = partial(_log_in_fp32, callback.log_tensors)
            callback.log_tensors = log_tensors  # type: ignore[method-assign]

    @property
    def _trainer(self) -> Any:
        return self._trainer_reference()

    def remove(self) -> None:
        """Leaves the callbacks and the optimizer as they were."""
        if self._callbacks:
            self._record.remove_hooks()
        for callback in self._callbacks:
            del callback.log_tensors

    def start_step(self) -> None:
        """To be called before each optimizer step."""
        if not self._callbacks:
            return
        gradients = updates = False
        after_step = _View(
            self._trainer, _total_batches_completed=self._trainer.steps_completed + 1
        )
        for callback in self._callbacks:
            with _given(callback, after_step):
                gradients |= _logs_statistics(callback)
                updates |= callback._should_log_distributions_this_batch()
        self._record.start(gradients, updates)

    def finish_step(self) -> None:
        """To be called when the callbacks have seen the step."""
        if self._callbacks:
            self._record.clear()

    @contextmanager
    def gathering(self, callback: TrainerCallback) -> Iterator[Any]:
        """
        Surrounds a callback's `on_batch`, which is to get the trainer that this yields. To be
        entered by every rank. If the callback of a primary raises, the other ranks wait for it
        until they are ended.
        """
        if callback not in self._callbacks or not _reads_parameters(callback):
            yield self._trainer
            return
        # Each node has a primary, and they take turns.
        for rank in self._primaries:
            if rank < dist.get_rank():
                self._follow(rank)
        if dist.get_rank() in self._primaries:
            trainer = self._view_of_trainer()
            if callback._param_updates is None:  # in the first step after a recovery
                callback._param_updates = {n: view.clone() for n, view in self._views.items()}
            with _given(callback, trainer), torch.no_grad():
                yield trainer
            self._finish_gathering()
        else:
            yield self._trainer
        for rank in self._primaries:
            if rank > dist.get_rank():
                self._follow(rank)

    def _view(self, index: int) -> GatheredParameter:
        parameter = self._parameters[index]
        shape = whole_shape(parameter)
        gradient = GatheredTensor(partial(self._whole, _GRADIENT, index), shape)
        return GatheredParameter(
            partial(self._whole, _WEIGHT, index),
            shape,
            parameter.requires_grad,
            gradient=partial(self._gradient_of, parameter, gradient),
            update=GatheredUpdate(partial(self._whole, _UPDATE, index), shape),
        )

    def _gradient_of(
        self, parameter: torch.nn.Parameter, gathered: GatheredTensor
    ) -> Optional[torch.Tensor]:
        # There are none in a step that was skipped because it would have overflowed.
        if not parameter.requires_grad or not self._record.gradients:
            return None
        # It is whole, and perhaps sparse, if the optimizer steps the parameter itself.
        return self._record.gradients.get(parameter, gathered)

    def _view_of_trainer(self) -> "_View":
        view_of = dict(zip(self._parameters, self._views.values()))
        param_groups = [
            {**group, "params": [view_of[parameter] for parameter in parameters]}
            for group, parameters in zip(self._trainer.optimizer.param_groups, self._shards.groups)
        ]
        return _View(
            self._trainer,
            model=_View(
                self._trainer.model,
                named_parameters=lambda: iter(self._views.items()),
                parameters=lambda: iter(self._views.values()),
            ),
            optimizer=_View(self._trainer.optimizer, param_groups=param_groups),
        )

    def _whole(self, kind: int, index: int) -> torch.Tensor:
        """Called by a primary alone, while the others follow it."""
        request = (kind, index)
        if self._gathered[0] != request:
            self._gathered = (None, None)  # before there is another
            if self._needs_all_ranks(kind, index):
                self._broadcast(request, dist.get_rank())
            self._gathered = (request, self._gather(kind, index))
        whole = self._gathered[1]
        assert whole is not None
        return whole

    def _needs_all_ranks(self, kind: int, index: int) -> bool:
        parameter = self._parameters[index]
        is_sharded = parameter.requires_grad
        if kind == _WEIGHT:
            is_sharded = not self._shards.has_whole(parameter)
        return self._shards.needs_all_ranks and is_sharded

    def _finish_gathering(self) -> None:
        self._gathered = (None, None)
        if self._shards.needs_all_ranks:
            self._broadcast((_NOTHING_MORE, 0), dist.get_rank())

    def _follow(self, primary: int) -> None:
        """Takes part in what a primary gathers."""
        while self._shards.needs_all_ranks:
            kind, index = self._broadcast(None, primary)
            if kind == _NOTHING_MORE:
                return
            self._gather(kind, index)

    def _gather(self, kind: int, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        if kind == _WEIGHT:
            if self._shards.has_whole(parameter):
                return parameter.data
            return weights.full_parameter(parameter, self._shards).float()
        if not parameter.requires_grad:  # which no step changes
            return torch.zeros(1, device=parameter.device)
        recorded = self._record.gradients if kind == _GRADIENT else self._record.updates
        return self._shards.gather_alike(parameter, recorded)

    def _broadcast(self, request: Optional[Tuple[int, int]], primary: int) -> List[int]:
        message = torch.tensor(request or (0, 0), device=self._trainer.cuda_device)
        dist.broadcast(message, src=primary)
        return message.tolist()


class _View:
    """
    An object with other values for some of its attributes.

    # Parameters

    viewed : `Any`, required.
    values : `Any`
        By the attribute's name.
    """

    def __init__(self, viewed: Any, **values: Any) -> None:
        vars(self).update(values, _viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)


@contextmanager
def _given(callback: LogWriterCallback, trainer: Any) -> Iterator[None]:
    """Within it the callback, which keeps the trainer, has this one."""
    original, callback.trainer = callback.trainer, trainer
    try:
        yield
    finally:
        callback.trainer = original


def _logs_statistics(callback: LogWriterCallback) -> bool:
    return callback._should_log_parameter_statistics and callback._should_log_this_batch()


def _reads_parameters(callback: LogWriterCallback) -> bool:
    """Whether it may read parameters, gradients or learning rates in this step."""
    return (
        _logs_statistics(callback)
        or (callback._should_log_learning_rate and callback._should_log_this_batch())
        or callback._should_log_distributions_this_batch()
        # It makes copies then, to see how far the next step moves them.
        or callback._should_log_distributions_next_batch()
    )


def _ranks_of_primaries(trainer: Any) -> List[int]:
    """To be called by every rank."""
    are_primary = agreement.numbers_of_all([int(trainer.is_primary)], trainer.cuda_device)
    return [rank for rank, (is_primary,) in enumerate(are_primary) if is_primary]


def _log_in_fp32(
    log_tensors: Callable[..., None], tensors: Dict[str, torch.Tensor], *args: Any, **kwargs: Any
) -> None:
    """
    NumPy, through which histograms are made, has no bf16, in which activations may be.
    """
    in_fp32 = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in tensors.items()
    }
    log_tensors(in_fp32, *args, **kwargs)
