import json
import logging
from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, Optional

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import (
    MultiProcessDataLoader,
    MultiTaskDataLoader,
    SimpleDataLoader,
    TensorDict,
)
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from overrides import overrides

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.directories import Directories
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.modified_weights import Which, modified_weights
from allennlp_deepspeed.engine.moving_average import ShardedMovingAverage
from allennlp_deepspeed.engine.weight_watch import WeightWatch
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.gradients.backward_and_update import GradientStep, clip_values
from allennlp_deepspeed.gradients.gradient_sync import GradientSynchronizer
from allennlp_deepspeed.gradients.loss_weights import LossWeights
from allennlp_deepspeed.gradients.reshard_after_micro_batch import ReshardAfterMicroBatch
from allennlp_deepspeed.processes.interruption import TrainingInterrupted
from allennlp_deepspeed.reports.log_writers import LogWriters
from allennlp_deepspeed.training import callbacks as callback_kinds
from allennlp_deepspeed.training.batch_groups import BatchGroup
from allennlp_deepspeed.training.callbacks import goes_backward, reads_gradients
from allennlp_deepspeed.training.device_transfer import to_device
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.step_extension import StepContext, StepExtensions

# Which move batches to their `cuda_device`, if they have one.
_LOADERS_OF_ALLENNLP = (MultiProcessDataLoader, MultiTaskDataLoader, SimpleDataLoader)


def _of_progress(name: str) -> Any:
    def read(self: "EngineTrainer") -> Any:
        return getattr(self._progress, name)

    def write(self: "EngineTrainer", value: Any) -> None:
        setattr(self._progress, name, value)

    return property(read, write)


logger = logging.getLogger(__name__)


class EngineTrainer(GradientDescentTrainer):
    """
    A trainer with an engine, as callbacks, models, notebooks and other loops see it: the engine's
    lifetime, what works on it, and what may be done to gradients and weights around it. How it
    trains is `DeepSpeedTrainer`'s.
    """

    _ddp_wrapped_model: DeepSpeedWrappedModel
    _checkpointer: Optional[DeepSpeedCheckpointer]
    _moving_average: Optional[ShardedMovingAverage]
    _has_trained: bool
    _directories: Directories
    _progress: Progress
    _buffers: BufferBroadcast
    _gradient_synchronization: str
    _extensions: StepExtensions
    _gradients: GradientSynchronizer
    _gradient_step: GradientStep
    _weight_watch: WeightWatch

    # AllenNLP's loop keeps them on itself.
    _epochs_completed = _of_progress("epochs_completed")
    _batches_in_epoch_completed = _of_progress("batches_in_epoch_completed")
    _total_batches_completed = _of_progress("total_batches_completed")
    _start_after_epochs_completed = _of_progress("start_after_epochs_completed")
    _start_after_batches_in_epoch_completed = _of_progress("start_after_batches_in_epoch_completed")
    _should_validate_this_epoch = _of_progress("should_validate_this_epoch")

    @property
    def engine(self) -> DeepSpeedEngine:
        """The `DeepSpeedEngine` around the model."""
        return self._ddp_wrapped_model.engine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """
        Within it backward passes leave their gradients on this rank: they are added up, whole, and
        reduced across the ranks with the next pass outside of it that reduces, at the latest at the
        end of the optimizer step. For models and callbacks that go backward several times in a
        step, at every ZeRO stage; as
        [`DistributedDataParallel.no_sync`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

        ```python
        class BackwardInChunks(TrainerCallback):
            reads_gradients = False

            def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
                *losses, last_loss = [
                    loss / trainer.group_size for loss in batch_outputs["chunk_losses"]
                ]
                with trainer.no_sync():
                    for loss in losses:
                        trainer.engine.backward(loss, scale_wrt_gas=False)
                trainer.engine.backward(last_loss, scale_wrt_gas=False)
                return True
        ```

        `trainer.group_size` is the number of micro-batches of the step.

        To be entered by every rank, during a step. Unlike with `DistributedDataParallel` the
        forward pass may be outside; at ZeRO stage 3 both gather parameters, so that every rank must
        make the same passes. Until gradients are reduced, each rank holds them whole. Where a model
        goes backward in its own forward pass, all of that is to be within `no_sync`. It may be
        nested.

        A callback with `on_backward` may read gradients after any pass outside `no_sync`, and finds
        them averaged over the ranks, which costs a reduction for each such pass. One that doesn't
        read them says so with the class attribute `reads_gradients = False`: then there is one
        reduction, at the end.
        """
        with self._gradients.no_sync():
            yield

    @contextmanager
    def modified_weights(self, which: Which = None) -> Iterator[None]:
        """
        For callbacks that change weights outside the optimizer. Within it the model's parameters
        are whole and in fp32, with the values that the optimizer steps, and may be changed in
        place, through `.data` too. When it ends, the changes are written to these, and to the
        weights that the model computes with, at every ZeRO stage and precision. Changes that are
        made elsewhere would be undone by the next step, and end in an error.

        ```python
        class Clamp(TrainerCallback):
            def on_batch(self, trainer, *args, is_training, **kwargs) -> None:
                if is_training:
                    with trainer.modified_weights(["_critic"]):
                        for parameter in trainer.model._critic.parameters():
                            parameter.clamp_(-0.01, 0.01)
        ```

        To be entered by every rank, between steps, with the same `which`. All make the change, and
        what rank 0 has made of the weights counts. Not for forward passes. Frozen parameters can be
        changed too; in half precision these are rounded to it, since they are kept in no other. If
        it ends by an exception, the weights stay as they were, but for those that the optimizer
        steps whole, at stage 0 in fp32.

        # Parameters

        which : `Union[str, Parameter, Iterable]`, optional (default = `None`)
            Parameters, or regular expressions that are searched in their names: only these are
            gathered. `None` for all.

        # Raises

        `ConfigurationError`
            If a frozen parameter has been changed that the trainer's moving average was given.
        `RuntimeError`
            If weights have been changed before.
        """
        self._weight_watch.raise_if_changed()
        average = self._moving_average
        may_change = (lambda _: True) if average is None else average.may_change
        try:
            with modified_weights(self.engine, which, may_change):
                yield
        finally:
            # After an exception too: what was changed has been put back.
            self._weight_watch.snapshot()

    @contextmanager
    def session(self) -> Iterator[None]:
        """
        Keeps the engine up. `train` is such a session, and destroys the engine when it ends; put a
        session around it to use the engine after training. A trainer has one: when the outermost
        one ends, however it does, the engine is destroyed. In a single process the model is a plain
        fp32 `Model` then, with the trained weights. With several workers the weights stay sharded,
        and the trained ones are in the archive.

        # Raises

        `RuntimeError`
            If the engine has been destroyed.
        """
        wrapped_model = self._ddp_wrapped_model
        if wrapped_model.is_in_use:
            yield
            return
        with wrapped_model.in_use():
            try:
                yield
                self._weight_watch.warn_if_changed()
                if self._checkpointer is not None:
                    self._checkpointer.finish()
            except BaseException as error:
                if self._checkpointer is not None:
                    # All ranks are here after an interruption, and this is the only one after a
                    # Ctrl-C.
                    is_agreed = isinstance(error, (TrainingInterrupted, KeyboardInterrupt))
                    (self._checkpointer.finish if is_agreed else self._checkpointer.abandon)()
                raise

    def close(self) -> None:
        """
        Destroys the engine, if it is up, as the end of a session does. For a trainer that is not
        going to train; one that is dropped, or whose model is given to another, is closed by
        itself. May be called again.
        """
        if self._ddp_wrapped_model.is_in_use:
            raise RuntimeError("A trainer can't be closed in its own `train` or `session`.")
        self._ddp_wrapped_model.destroy()

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """In the order in which they are called."""
        return self._callbacks

    @property
    def is_primary(self) -> bool:
        """Whether this worker writes what its serialization directory has once."""
        return self._primary

    def _find_directories(self, serialization_dir: Optional[str]) -> None:
        """To be called by every rank."""
        self._directories = found = Directories.find(serialization_dir)
        if not self._distributed:
            return
        self._primary = found.is_first_here
        section = self._ddp_wrapped_model.config.engine_config.get("checkpoint", {})
        said = section.get("use_node_local_storage")
        if found.are_one and not said and len(set(found.hosts)) == 1:
            return
        contradiction = said is not None and said == found.are_one
        logger.log(
            logging.WARNING if contradiction else logging.INFO,
            "%s%s",
            found.description(),
            f" 'deepspeed_config.checkpoint.use_node_local_storage' is {json.dumps(said)}, and "
            "is not needed: leave it out."
            if contradiction
            else "",
        )

    @property
    def directories(self) -> Directories:
        """Which ranks share a serialization directory."""
        return self._directories

    @property
    def steps_completed(self) -> int:
        """Optimizer steps, of all epochs."""
        return self._progress.total_batches_completed

    @property
    def group_size(self) -> int:
        """
        The number of micro-batches by which the losses of the step are divided, for callbacks that
        go backward themselves.
        """
        return self._gradient_step.group_size

    def go_backward(self, batch: TensorDict) -> float:
        """
        Goes forward and backward through a batch that is an optimizer step by itself, for loops
        other than `train`; `step_optimizer` is next. To be called by every rank, in a `session`.
        Returns this rank's loss.
        """
        self._ddp_wrapped_model.check_optimizer_states()
        batches, size, num_fillers = self._extensions.divide(BatchGroup([batch], 1))
        with self._gradient_step.accumulate(batches, size, num_fillers):
            losses = [
                float(self._gradient_step.micro_batch(batch, is_last=i == size)["loss"])
                for i, batch in enumerate(batches, start=1)
            ]
        return sum(losses) / size

    def step_optimizer(self) -> None:
        """Makes the optimizer step after `go_backward`. To be called by every rank."""
        self._gradient_step.step()

    @overrides
    def rescale_gradients(self) -> Optional[float]:
        """Is called by AllenNLP's loops, which can't step the optimizer."""
        raise RuntimeError(
            "This loop is AllenNLP's own, and only the engine can make a step of the 'deepspeed' "
            "trainer. For `search_learning_rate`, import it after `allennlp_deepspeed`."
        )

    def _attach_engine(self) -> None:
        """Constructs what works on the engine."""
        wrapped_model = self._ddp_wrapped_model
        if wrapped_model.config.zero_stage == 3:
            # Where whole weights are kept while they are used: there may not be memory for them.
            wrapped_model.mapping_directory = self._serialization_dir
        if self._moving_average is not None:
            moving_average = ShardedMovingAverage(self._moving_average, self.engine)
            wrapped_model.before_destroying(moving_average.release)
            self._moving_average = moving_average
        if self._grad_clipping is not None:
            clipping = clip_values(self.optimizer, self._grad_clipping)
            wrapped_model.before_destroying(clipping.remove)
        self._gradients = self._construct_gradients()
        wrapped_model.before_destroying(self._gradients.remove_hooks)
        # After the hook that clips: it records what the optimizer steps with.
        self._log_writers = LogWriters(self)
        wrapped_model.before_destroying(self._log_writers.remove)
        self._weight_watch = WeightWatch(self.engine)
        if self._moving_average is not None:
            self._check_averages(self._moving_average)
            self._moving_average.before_assigning = self._weight_watch.raise_if_changed
        self._extensions.construct(
            StepContext(
                self.model,
                wrapped_model,
                self._gradients,
                self._callbacks,
                [self.data_loader, self._validation_data_loader],
                forward=self._go_forward,
                batch_outputs=super().batch_outputs,
                prepare=self._prepare_batch,
            )
        )
        self._gradient_step = GradientStep(
            wrapped_model,
            self._gradients,
            self._extensions.train_on,
            LossWeights(self.model, self.cuda_device, self._extensions.divides_batches),
            forward=self._go_forward,
            go_backward=self._call_on_backward,
            weight_watch=self._weight_watch,
            reshard_after_micro_batch=ReshardAfterMicroBatch(
                self.engine,
                wrapped_model.config.reshard_after_micro_batch,
                self._num_micro_batches,
            ),
            moving_average=self._moving_average,
        )
        if isinstance(self.data_loader, _LOADERS_OF_ALLENNLP):
            # They would wait for the device with each batch. `batch_outputs` doesn't.
            wrapped_model.before_destroying(
                partial(setattr, self.data_loader, "cuda_device", self.data_loader.cuda_device)
            )
            self.data_loader.cuda_device = None

    def _check_averages(self, moving_average: ShardedMovingAverage) -> None:
        for name, module in self.model.named_modules():
            is_scaled = getattr(module, "max_norm", None) is not None
            if is_scaled and not all(map(moving_average.may_change, module.parameters())):
                raise ConfigurationError(
                    "'trainer.moving_average' averages what the optimizer updates, and not the "
                    f"frozen weight of '{name}', which 'max_norm' changes: give both the trained "
                    "parameters only."
                )

    def _construct_gradients(self) -> GradientSynchronizer:
        callback_kinds.check(self._callbacks)
        return GradientSynchronizer(
            self.engine,
            mode=self._gradient_synchronization,
            num_micro_batches=self._num_micro_batches,
            find_unused_parameters=self._ddp_wrapped_model.find_unused_parameters,
            several_passes=any(map(goes_backward, self._callbacks)),
            average_each_pass=any(map(reads_gradients, self._callbacks)),
        )

    @property
    def _num_micro_batches(self) -> int:
        """In an optimizer step, as DeepSpeed sees them; not exact where it isn't known."""
        # Each pass is a micro-batch to DeepSpeed, and there are several.
        num_passes = 2 if self._extensions.makes_several_passes else 1
        return self._num_gradient_accumulation_steps * num_passes

    def _go_forward(self, batch: TensorDict) -> Dict[str, torch.Tensor]:
        # Looked up in each micro-batch, because a callback may have put its own there.
        return self.batch_outputs(batch, for_training=True)

    def _prepare_batch(self, batch: TensorDict) -> TensorDict:
        """Gives every rank the buffers of rank 0, and the device the batch."""
        if self._distributed:
            self._buffers.broadcast()
        return batch if self.cuda_device.type == "cpu" else to_device(batch, self.cuda_device)

    def _call_on_backward(self, batch_outputs: Dict[str, torch.Tensor]) -> bool:
        backward_called = False
        for callback in self._callbacks:
            backward_called |= callback.on_backward(self, batch_outputs, backward_called)
        return backward_called
