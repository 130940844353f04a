"""
Owns DeepSpeed's engine in an AllenNLP worker, from its initialization to its end.
"""

import gc
import logging
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, List, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpWrappedModel
from typing_extensions import override

from allennlp_deepspeed.config.contradictions import check_unused_parameters
from allennlp_deepspeed.config.deepspeed_config import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, OffloadDeviceEnum
from allennlp_deepspeed.engine.lifecycle import activation_checkpointing, features
from allennlp_deepspeed.engine.lifecycle.compilation import Compiler, explain_errors_at_stage_3
from allennlp_deepspeed.engine.lifecycle.initialize_and_destroy import destroy
from allennlp_deepspeed.engine.optimizers import stepped_optimizers
from allennlp_deepspeed.engine.parameters.model_check import (
    check_loaded_weights,
    check_model,
    check_same_order,
)
from allennlp_deepspeed.engine.parameters.model_snapshot import ModelSnapshot
from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.parameters.shared_attributes import SharedAttributes
from allennlp_deepspeed.engine.process.process_environment import use_accelerator
from allennlp_deepspeed.engine.zero3.deferred_resharding import clear_active_modules
from allennlp_deepspeed.engine.zero3.regularization import PartitionedRegularizer

logger = logging.getLogger(__name__)

_NO_ENGINE = (
    "This trainer's engine is destroyed; a trainer trains once. Construct a new trainer, with a "
    "new optimizer or to resume from a checkpoint. To use the engine's forward pass after "
    "`train()`, put both into one `with trainer.session():`."
)


def _wrap_nothing(model: Model, zero_stage: int) -> Callable[[], None]:
    return lambda: None


class DeepSpeedWrappedModel(DdpWrappedModel):
    """
    Wraps the model in DeepSpeed's engine. It replaces the model wrapped in
    `DistributedDataParallel` of AllenNLP's trainer.

    Every rank must construct it: `deepspeed.initialize` broadcasts the weights of rank 0 and, at
    ZeRO stage 3, partitions them.

    # Parameters

    model : `Model`, required.
        The model to train, complete and in fp32, on any device. The engine moves it.
    config : `ResolvedConfig`, required.
        The engine's resolved configuration.
    device : `torch.device`, required.
        The device of this worker.
    local_rank : `int`, required.
        The worker's rank on its node.
    optimizer : `torch.optim.Optimizer`, optional (default = `None`)
        The optimizer that the engine shards and steps. `None` if `config` has an `"optimizer"`
        section, from which DeepSpeed constructs it.
    find_unused_parameters : `bool`, optional (default = `False`)
        As in `DistributedDataParallel`: whether there may be parameters that only some ranks use in
        a step.
    checkpointed_modules : `List[str]`, optional (default = `None`)
        Regular expressions for the modules whose activations are checkpointed, in addition to those
        that the model has wrapped itself.
    wrap : `Callable[[Model, int], Callable[[], None]]`, optional
        Wraps modules of the model before the engine is initialized, given its ZeRO stage. Returns a
        function that restores them.

    # Raises

    `ConfigurationError`
        If DeepSpeed doesn't support `config` on this machine or with this model.
    """

    plain_model: Model
    config: ResolvedConfig
    device: torch.device
    given_optimizer: Optional[torch.optim.Optimizer]
    compiler: Optional[Compiler]
    """`None` if nothing is compiled."""
    is_alone: bool
    """Whether there is one process. The process group may be destroyed before the engine."""
    must_resume: bool
    """Whether the optimizer's states are lost, and only a checkpoint can replace them."""
    in_precision: Callable[[Callable], Callable]
    """Makes a forward pass run in the model's precision."""
    snapshot: ModelSnapshot
    shared_attributes: SharedAttributes
    regularizer: PartitionedRegularizer

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        device: torch.device,
        local_rank: int,
        optimizer: Optional[torch.optim.Optimizer] = None,
        find_unused_parameters: bool = False,
        checkpointed_modules: Optional[List[str]] = None,
        wrap: Callable[[Model, int], Callable[[], None]] = _wrap_nothing,
    ) -> None:
        use_accelerator(device)
        check_same_order(model)
        check_loaded_weights(model, optimizer, config)
        check_model(model, config)
        check_unused_parameters(find_unused_parameters, config.zero_stage)
        self.plain_model, self.config, self.device = model, config, device
        self.local_rank, self.given_optimizer = local_rank, optimizer
        self.find_unused_parameters = find_unused_parameters
        # Directory of memory-mapped full weights, which may not fit into memory.
        self.mapping_directory: Optional[str] = None
        # Whether a trainer is in its session, so that no other may destroy the engine.
        self.is_in_use = False
        self.is_alone = self.must_resume = False
        self.in_precision = lambda forward: forward
        self.compiler = None if config.torch_compile is None else Compiler(config.torch_compile)
        # Undone in reverse order, by `destroy` or if the constructor fails.
        self._undo = ExitStack()
        self._engine: Optional[DeepSpeedEngine] = None
        self._shards: Optional[Shards] = None
        destroy_engines(model)
        _check_autocast(config)
        with ExitStack() as undo_if_failed:
            undo_if_failed.callback(self.destroy)
            if optimizer is not None:
                stepped_optimizers.check(model, optimizer)
            self._undo.callback(wrap(model, self.stage))
            if checkpointed_modules is not None:
                take_back = activation_checkpointing.checkpoint_modules(model, checkpointed_modules)
                self._undo.callback(take_back)
            features.install_all(self, self._undo)
            undo_if_failed.pop_all()
        self.model = self.engine
        _with_engine.add(self)
        super().__init__(self.engine, local_rank=local_rank, world_size=dist.get_world_size())

    def tear_down(self) -> None:
        """
        Destroys the engine. In a single process the model is restored to a plain one, with the
        trained weights. With several workers it stays sharded.

        Works around DeepSpeed 0.19.8: `destroy` leaves the model partitioned and in half precision,
        with DeepSpeed's hooks and containers. A global stack and a cache still refer to the model,
        and swap files stay on disk. The communication logger, autocast, activation checkpointing
        and the linear function of stage 3 stay enabled in the process. Gone when a model at stage 3
        is unpartitioned then, and no such state remains.
        [#7204](https://github.com/deepspeedai/DeepSpeed/issues/7204)
        """
        engine, before = self._engine, self.snapshot
        with ExitStack() as undo:
            if self.is_alone:
                undo.callback(before.restore)
            undo.callback(before.remove_added)
            if engine is None:
                return
            # Before the process group: a worker can abort if the group is destroyed before the
            # engine.
            undo.callback(destroy, engine, self.plain_model)
            if engine.global_steps > 0 and engine.optimizer is not engine.basic_optimizer:
                stepped_optimizers.refuse_steps(engine.basic_optimizer)
            if self.is_alone:
                if self.stage == 3:
                    clear_active_modules(engine)
                offload = engine.zero_offload_param()
                is_offloaded = offload is not None and offload.device != OffloadDeviceEnum.none
                device = torch.device("cpu") if is_offloaded else self.device
                before.collect(self.shards, device, self.mapping_directory)

    @property
    def engine(self) -> DeepSpeedEngine:
        """
        Returns the engine.

        # Raises

        `RuntimeError`
            If it has been destroyed.
        """
        self.check_has_engine()
        assert self._engine is not None
        return self._engine

    @engine.setter
    def engine(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    @property
    def stage(self) -> int:
        """Returns the ZeRO stage."""
        return self.config.zero_stage

    @property
    def shards(self) -> Shards:
        """
        Returns the mapping of parameters to this rank's slices. At stage 0 it is of now, because
        callbacks may add parameter groups there. At stages 1 to 3 it is fixed.

        # Raises

        `RuntimeError`
            If the engine has been destroyed.
        """
        if self._shards is None or self.stage == 0:
            self._shards = Shards(self.engine)
        return self._shards

    def check_has_engine(self) -> None:
        """
        Checks that the engine exists.

        # Raises

        `RuntimeError`
            If the engine has been destroyed.
        """
        if self._engine is None:
            raise RuntimeError(_NO_ENGINE)

    @contextmanager
    def session(self) -> Iterator[None]:
        """
        Context manager that destroys the engine at exit, and prevents other trainers of the same
        model from destroying it before.

        # Raises

        `RuntimeError`
            If the engine has been destroyed.
        """
        self.check_has_engine()
        self.is_in_use = True
        try:
            yield
        except BaseException:
            # Whatever fails in `destroy`, this is the error to be shown.
            self.is_in_use = False
            try:
                self.destroy()
            except Exception as error:
                logger.warning("The engine could not be destroyed after an error: %s", error)
            raise
        self.is_in_use = False
        self.destroy()

    def explain_compiler_errors(self) -> ContextManager[None]:
        """
        Context manager in which errors of compiled code in the model say what it can't do at ZeRO
        stage 3.
        """
        if self.stage < 3:
            return nullcontext()
        return explain_errors_at_stage_3(self.plain_model)

    def check_optimizer_states(self) -> None:
        """
        Checks that the optimizer's states can be used. Must be called before training that doesn't
        resume from a checkpoint.

        # Raises

        `ConfigurationError`
            If the optimizer has made steps, and its states are lost.
        """
        if self.must_resume:
            raise ConfigurationError(stepped_optimizers.LOST_STATES)

    @property
    @override
    def is_sharded(self) -> bool:
        """
        Returns `True`, so that AllenNLP's trainer calls the methods that save or restore the model
        on every rank.
        """
        return True

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """
        Returns the optimizer inside DeepSpeed's. Its `param_groups` have the learning rates and the
        tensors that it updates, at ZeRO stages 1 and 2 this rank's fp32 shards. At stage 3 they
        have the model's parameters, except during a step.
        """
        return self.engine.basic_optimizer

    @contextmanager
    def replace_forward(self, function: Callable) -> Iterator[None]:
        """
        Context manager in which `function` is the model's forward pass, with DeepSpeed's hooks
        around it, which gather parameters at ZeRO stage 3.

        # Parameters

        function : `Callable`, required.
            A function that computes with the model.
        """
        model = self.engine.module
        forward = vars(model).get("forward")
        if self.compiler is not None and self.stage < 3:
            function = self.compiler.compile(function)
        model.forward = self.in_precision(function)
        try:
            yield
        finally:
            del model.forward
            if forward is not None:
                model.forward = forward

    def call_before_destroy(self, undo: Callable[[], None]) -> None:
        """Registers a function that is called before the engine is destroyed."""
        self._undo.callback(undo)

    def destroy(self) -> None:
        """
        Destroys the engine, and the process group if it was created here. Not a collective, so that
        a failing rank may call it alone. It may be called again. In a single process the model is a
        plain fp32 `Model` afterwards, on the CPU if its weights were offloaded.
        """
        try:
            self._undo.close()
        finally:
            self.model, self._engine, self._shards = self.plain_model, None, None
            _with_engine.discard(self)
            # The engine's parts reference each other, and own memory, threads and files.
            gc.collect()


# Wrapped models whose engine exists. Global, because another trainer must find them.
_with_engine: "weakref.WeakSet[DeepSpeedWrappedModel]" = weakref.WeakSet()


def destroy_engines(model: torch.nn.Module) -> None:
    """
    Destroys engines of a model, or of parts of it, that are not in use: a notebook's cell that
    constructs a trainer may be run again.

    # Raises

    `ConfigurationError`
        If an engine is in use.
    """
    parameters = set(model.parameters())
    for wrapped_model in list(_with_engine):
        if parameters.isdisjoint(wrapped_model.model.parameters()):
            continue
        if wrapped_model.is_in_use:
            raise ConfigurationError(
                "Another trainer is using this model. Construct a new one after its `train` or "
                "`session` has ended."
            )
        wrapped_model.destroy()


def _check_autocast(config: ResolvedConfig) -> None:
    """
    Checks that all engines have the same autocast, which is global in DeepSpeed.

    # Raises

    `ConfigurationError`
        If another engine has a different one.
    """
    if all(_autocast_of(other.config) == _autocast_of(config) for other in _with_engine):
        return
    gc.collect()  # a dropped trainer references itself
    for other in _with_engine:
        if _autocast_of(other.config) != _autocast_of(config):
            raise ConfigurationError(
                "Another trainer of this process still uses a different autocast "
                "('trainer.deepspeed_config.torch_autocast', 'trainer.use_amp'): call its "
                "`close()` before constructing this one."
            )


def _autocast_of(config: ResolvedConfig) -> Any:
    is_on = config.precision == "torch_autocast"
    return config.engine_config["torch_autocast"] if is_on else None
