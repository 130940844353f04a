"""
Brings up DeepSpeed's engine inside an AllenNLP worker, and takes it down again. No other module
calls `deepspeed.initialize`, touches the environment variables that DeepSpeed reads, or makes a
process group.
"""

import gc
import inspect
import logging
import os
import weakref
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpWrappedModel
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from overrides import overrides
from torch.utils._pytree import tree_map_only

from allennlp_deepspeed.config.deepspeed_config import ResolvedConfig
from allennlp_deepspeed.config.operators import check_nvme
from allennlp_deepspeed.engine import (
    activation_checkpointing,
    deepspeed_logging,
    loss_scaling,
    max_norm,
    module_hooks,
    nvme_states,
    parameter_layout,
    restoration,
)
from allennlp_deepspeed.engine.regularization import PartitionedRegularizer, penalty_in_fp32
from allennlp_deepspeed.engine.restoration import Restoration
from allennlp_deepspeed.processes.one_process import as_one_process

logger = logging.getLogger(__name__)

_HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class DeepSpeedWrappedModel(DdpWrappedModel):
    """
    What the trainer holds of DeepSpeed: the engine around the model, in the place where AllenNLP's
    trainer holds a model wrapped in `DistributedDataParallel`.

    Every rank must construct it: `deepspeed.initialize` broadcasts the weights of rank 0 and, at
    ZeRO stage 3, partitions them.

    # Parameters

    model : `Model`, required.
        The model to train, complete and in fp32, on any device. The engine moves it.
    config : `ResolvedConfig`, required.
        The engine's configuration, with nothing left to fill in.
    device : `torch.device`, required.
        This worker's device.
    local_rank : `int`, required.
        The worker's rank on its node.
    optimizer : `torch.optim.Optimizer`, optional (default = `None`)
        The optimizer that the engine is to shard and step. `None` if `config` has an `"optimizer"`
        section, in which case DeepSpeed constructs it.
    find_unused_parameters : `bool`, optional (default = `False`)
        As in `DistributedDataParallel`: whether there may be parameters that in a step only some of
        the ranks use.
    checkpointed_modules : `List[str]`, optional (default = `None`)
        Regular expressions for the modules whose activations are checkpointed, besides those that
        the model has wrapped itself.

    # Raises

    `ConfigurationError`
        If DeepSpeed can't do on this machine, or with this model, what `config` asks for.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        device: torch.device,
        local_rank: int,
        optimizer: Optional[torch.optim.Optimizer] = None,
        find_unused_parameters: bool = False,
        checkpointed_modules: Optional[List[str]] = None,
    ) -> None:
        _use_accelerator(device)
        check_nvme(config, device.type)
        check_sharding(model, config)
        if find_unused_parameters and config.zero_stage == 3:
            raise ConfigurationError(
                "'distributed.ddp_accelerator.find_unused_parameters' is true, but at ZeRO stage 3 "
                "ranks that use different parameters in a step would wait for each other for ever. "
                'Write "deepspeed_config": {"zero_optimization": {"stage": 2}}, or remove '
                "'ddp_accelerator' if all ranks use the same parameters in each step."
            )
        self.config = config
        self.find_unused_parameters = find_unused_parameters
        # Where whole weights are kept while they are used, if they may not fit into memory.
        self.mapping_directory: Optional[str] = None
        # How many are using the engine, which may not be taken from them.
        self.num_users = 0
        self._plain_model = model
        self._given = (device, local_rank, optimizer, checkpointed_modules)
        # Undone in the reverse order, by `destroy` or if anything fails in here.
        self._undo = ExitStack()
        self._autocast: Callable[[Callable], Callable] = lambda function: function
        self._engine: Optional[DeepSpeedEngine] = None
        self._loss_scale: Optional[Dict[str, Any]] = None  # of the engine before
        self.bring_up()
        super().__init__(self.engine, local_rank=local_rank, world_size=dist.get_world_size())

    def bring_up(self) -> None:
        """
        Brings up an engine, as the constructor has done, after `destroy`. To be called by every
        rank.

        # Raises

        `ConfigurationError`
            If the engine that was destroyed had something that no other can go on with.
        """
        device, local_rank, optimizer, checkpointed_modules = self._given
        model = self._plain_model
        close_engines_of(model)
        if optimizer is not None:
            restoration.check_optimizer_is_of(model, optimizer)
        with ExitStack() as undo_if_failed:
            undo_if_failed.callback(self.destroy)
            if checkpointed_modules is not None:
                self._undo.callback(
                    activation_checkpointing.checkpoint_modules(model, checkpointed_modules)
                )
            self._bring_up(model, self.config, device, local_rank, optimizer)
            undo_if_failed.pop_all()
        self.model = self.engine
        _up.add(self)

    def _bring_up(
        self,
        model: Model,
        config: ResolvedConfig,
        device: torch.device,
        local_rank: int,
        optimizer: Optional[torch.optim.Optimizer],
    ) -> None:
        self._undo.enter_context(process_environment(device, local_rank))
        if config.precision in _HALF_PRECISION:
            # AllenNLP's modules make fp32 tensors on the way (masks, lengths, means), which a layer
            # with weights in half precision refuses unless autocast brings them together.
            self._autocast = torch.autocast(device.type, dtype=_HALF_PRECISION[config.precision])
            forward = _returning_fp32(self._autocast(model.forward))
            # The model may have one of its own, where a library or a user has wrapped it.
            self._undo.enter_context(mock.patch.object(model, "forward", forward))
            if config.zero_stage < 3:  # where `PartitionedRegularizer` sees to it
                self._undo.enter_context(penalty_in_fp32(model))
        regularizer = PartitionedRegularizer(model) if config.zero_stage == 3 else None
        if regularizer is not None:
            self._undo.callback(regularizer.remove)
            self._undo.callback(parameter_layout.freeze_empty(model))
        before = Restoration(model, optimizer)
        self._undo.callback(self._leave, before, is_alone=dist.get_world_size() == 1)
        if config.precision == "fp16":
            self._undo.enter_context(_in_fp16(device))
        with _autocast_of_one_engine():
            self._engine, *_ = deepspeed.initialize(
                # DeepSpeed takes the device's index for the local rank unless it is told both.
                args=SimpleNamespace(local_rank=_device_index(device, local_rank)),
                model=model,
                optimizer=optimizer,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                config=config.engine_config,
            )
        if config.precision == "torch_autocast" and config.zero_stage > 0:
            # DeepSpeed asks for each gradient whether there is autocast in the process.
            self.engine.optimizer.get_param_comm_dtype = torch_autocast.get_comm_dtype
        before.find_added()
        self._undo.enter_context(deepspeed_logging.mended_reports(self.engine))
        self._undo.enter_context(
            activation_checkpointing.configured(model, config.engine_config, device)
        )
        if local_rank == 0 and self.engine.use_node_local_storage():
            # DeepSpeed asks for the index of the device instead, which may start at any.
            self.engine.save_non_zero_checkpoint = True
        if config.zero_stage == 3:
            self._undo.enter_context(module_hooks.only_with_graph(model))
        if regularizer is not None:
            regularizer.gather_with_model()
        _undo_first_step(self.engine)
        _keep_adagrad(self.engine)
        if config.precision == "fp16":
            self._undo.enter_context(loss_scaling.mended_loss_scale(self.engine))
        before.hand_over(self.engine, is_alone=dist.get_world_size() == 1)
        if self._loss_scale is not None:
            loss_scaling.load_state_dict(self.engine, self._loss_scale)
        if config.zero_stage == 0 and config.precision != "fp16":
            # DeepSpeed refuses `loss.backward()` at stage 0, where its own hooks would not run. The
            # trainer calls the reduction itself, and without a loss scale there is nothing else to
            # do.
            self.engine._support_torch_style_backward = True

    def _leave(self, before: Restoration, is_alone: bool) -> None:
        """
        Destroys the engine and leaves the model and the optimizer to others: in a single process as
        they were, with what they have learnt. With several the shards stay where they are.
        """
        engine = self._engine
        with ExitStack() as undo:
            undo.callback(_forget_modules, self._plain_model)
            if is_alone:
                undo.callback(before.restore)
            undo.callback(before.remove_added)
            if engine is None:
                return
            undo.callback(nvme_states.remove_swap_files, nvme_states.swap_folders(engine))
            # Before the process group: a worker can abort if the group goes away under a live
            # engine.
            undo.callback(_destroy_engine, engine)
            self._refuse_what_is_left(engine, is_alone)
            self._loss_scale = loss_scaling.state_dict(engine)
            if is_alone:
                before.collect(engine, self._device_afterwards(engine), self.mapping_directory)

    def _device_afterwards(self, engine: DeepSpeedEngine) -> torch.device:
        offload = engine.zero_offload_param()
        is_offloaded = offload is not None and offload.device != OffloadDeviceEnum.none
        return torch.device("cpu") if is_offloaded else self._given[0]

    def _refuse_what_is_left(self, engine: DeepSpeedEngine, is_alone: bool) -> None:
        optimizer = engine.basic_optimizer
        if not is_alone and engine.optimizer is not optimizer:
            restoration.refuse_steps(
                optimizer,
                "The optimizer can't be used again: training has left its states sharded over "
                f"{dist.get_world_size()} workers. To go on, put all training into one "
                "`with trainer.session():`, or recover from a checkpoint.",
            )
        elif engine.zero_nvme_offload_optimizer():
            restoration.refuse_steps(
                optimizer,
                "The optimizer can't be used again: training has left its states on NVMe. To go "
                "on, put all training into one `with trainer.session():`, or recover from a "
                "checkpoint.",
            )
        elif optimizer is not self._given[2]:
            restoration.refuse_steps(
                optimizer,
                "This optimizer, which DeepSpeed has constructed from "
                "deepspeed_config.optimizer, was gone with its engine. To go on, put all training "
                "into one `with trainer.session():`, or construct the optimizer yourself and give "
                "it to the trainer.",
            )

    @property
    def engine(self) -> DeepSpeedEngine:
        """
        # Raises

        `RuntimeError`
            If it is down.
        """
        if self._engine is None:
            raise RuntimeError(
                "The engine has been taken down. Put `with trainer.session():` around training "
                "and whatever is to use the engine afterwards."
            )
        return self._engine

    @property
    def is_up(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    @overrides
    def is_sharded(self) -> bool:
        """
        Always `True`, which is how AllenNLP's trainer is told to call on every rank whatever saves
        or restores the model.
        """
        return True

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """
        The optimizer inside DeepSpeed's: its `param_groups` carry the learning rates, and at ZeRO
        stages 1 to 3 this rank's shard of the fp32 weights.
        """
        return self.engine.basic_optimizer

    @contextmanager
    def forward_is(self, function: Callable) -> Iterator[None]:
        """
        Within it `function` is the model's forward pass, with all that DeepSpeed does around one:
        at ZeRO stage 3 its parameters are gathered.

        # Parameters

        function : `Callable`, required.
            One that computes with the model.
        """
        model = self.engine.module
        forward = vars(model).get("forward")
        model.forward = self._autocast(function)
        try:
            yield
        finally:
            del model.forward
            if forward is not None:
                model.forward = forward

    def before_destroying(self, undo: Callable[[], None]) -> None:
        """Has `undo` called before the engine is taken down."""
        self._undo.callback(undo)

    def destroy(self) -> None:
        """
        Takes the engine down, and the process group with it if it was made here. Not a collective,
        so that a failing rank may call it alone. May be called again. In a single process the model
        is a plain fp32 `Model` then, on the CPU if its weights were offloaded, and the optimizer
        has whole states for its parameters.
        """
        try:
            self._undo.close()
        finally:
            self.model, self._engine = self._plain_model, None
            _up.discard(self)
            # What an engine is made of refers to each other, and holds memory, threads and files.
            gc.collect()


# Those whose engine is up.
_up: "weakref.WeakSet[DeepSpeedWrappedModel]" = weakref.WeakSet()


def close_engines_of(model: torch.nn.Module) -> None:
    """
    Takes down engines that have been brought up around a model, or parts of it, and are not in use:
    a notebook's cell that constructs a trainer may be run again.

    # Raises

    `ConfigurationError`
        If one is in use.
    """
    parameters = set(model.parameters())
    for wrapped_model in list(_up):
        if parameters.isdisjoint(wrapped_model.model.parameters()):
            continue
        if wrapped_model.num_users > 0:
            raise ConfigurationError(
                "Another trainer is training this model. Construct a new one when its `train` or "
                "`session` has ended."
            )
        wrapped_model.destroy()


_environment = ExitStack()
_num_in_environment = 0


@contextmanager
def process_environment(device: torch.device, local_rank: int) -> Iterator[None]:
    """
    Within it this process is one that DeepSpeed can work in: it has a process group, and what
    DeepSpeed takes from its launcher. May be entered several times; the last to leave ends it.

    # Parameters

    device : `torch.device`, required.
        This worker's device.
    local_rank : `int`, required.
        The worker's rank on its node.
    """
    global _num_in_environment
    if _num_in_environment == 0:
        _set_up_environment(device, local_rank)
    _num_in_environment += 1
    try:
        yield
    finally:
        _num_in_environment -= 1
        if _num_in_environment == 0:
            _environment.close()


def _set_up_environment(device: torch.device, local_rank: int) -> None:
    with ExitStack() as undo:
        _use_accelerator(device)
        _skip_shared_memory_all_reduce()
        undo.enter_context(deepspeed_logging.logged_by_allennlp())
        if not dist.is_initialized():
            _init_group_of_one(device)
            undo.callback(_destroy_process_group)
            undo.enter_context(as_one_process())
        if device.type == "cpu":
            undo.enter_context(_fp16_on_cpu())
        undo.enter_context(parameter_layout.any_layout())
        undo.enter_context(module_hooks.linear_only_with_graph())
        undo.enter_context(module_hooks.keeping_what_is_read())
        undo.enter_context(max_norm.lookups_recorded())
        undo.callback(_restore_environment, {n: os.environ.get(n) for n in _LAUNCHER_VARIABLES})
        _set_launcher_variables(device, local_rank)
        # ZeRO-3 puts its own in the place of it.
        linear = torch.nn.functional.linear
        undo.enter_context(mock.patch.object(torch.nn.functional, "linear", linear))
        _environment.push(undo.pop_all())


def _returning_fp32(forward: Callable) -> Callable:
    """
    A forward pass whose outputs are in fp32 outside of training, because NumPy, which AllenNLP's
    predictions go through, has no bf16. In training its loss is, because fp16 has no number for
    that of a large batch, or with a regularizer's penalty.
    """

    @wraps(forward)
    def return_fp32(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return tree_map_only(torch.Tensor, _in_fp32, outputs)
        if "loss" in outputs:
            outputs["loss"] = _in_fp32(outputs["loss"])
        return outputs

    return return_fp32


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF_PRECISION.values() else tensor


def _destroy_engine(engine: DeepSpeedEngine) -> None:
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()
    engine.destroy()


def _forget_modules(model: torch.nn.Module) -> None:
    """Has ZeRO-3 let go of modules that it keeps in places that belong to no engine."""
    modules = set(model.modules())
    parameter_offload.FWD_MODULE_STACK[:] = [
        module for module in parameter_offload.FWD_MODULE_STACK if module not in modules
    ]
    # A cache of all engines, which find it again.
    function = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(function).nonlocals["func"].cache_clear()


def _destroy_process_group() -> None:
    # DeepSpeed's function, because it also forgets the groups that it made of this one. It isn't
    # there yet if DeepSpeed has not come so far.
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _use_accelerator(device: torch.device) -> None:
    """DeepSpeed trains on the best device it sees; AllenNLP on the one that the config names."""
    if get_accelerator().device_name() != device.type:
        if _num_in_environment > 0:
            # Its process group is for that device.
            raise ConfigurationError(
                f"A trainer on '{get_accelerator().device_name()}' is still up in this process: "
                f"call its `close()` before one on '{device.type}' is constructed, or give both "
                "the same 'cuda_device'."
            )
        set_accelerator(CPU_Accelerator() if device.type == "cpu" else CUDA_Accelerator())


@contextmanager
def _autocast_of_one_engine() -> Iterator[None]:
    """
    Within it an engine is brought up. What DeepSpeed keeps of its autocast for the whole process is
    as before when it ends, since other engines may be up, and go in any order.
    """
    with mock.patch.multiple(
        torch_autocast, TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None
    ):
        yield


_num_in_fp16 = 0


@contextmanager
def _fp16_on_cpu() -> Iterator[None]:
    """
    Within it DeepSpeed's accelerator for the CPU takes fp16 as long as an engine is up that trains
    in it. By itself it does only for CPUs that have instructions for it; PyTorch computes in it on
    all of them.
    """
    is_fp16_supported = get_accelerator().is_fp16_supported
    with mock.patch.object(
        get_accelerator(), "is_fp16_supported", lambda: _num_in_fp16 > 0 or is_fp16_supported()
    ):
        yield


@contextmanager
def _in_fp16(device: torch.device) -> Iterator[None]:
    """Surrounds the life of an engine in fp16."""
    global _num_in_fp16
    if device.type == "cpu":
        logger.warning(
            "fp16 is slow on a CPU. To train there, rather than to try out what is to train on a "
            'GPU, write "bf16": {"enabled": true}.'
        )
    _num_in_fp16 += 1
    try:
        yield
    finally:
        _num_in_fp16 -= 1


def _skip_shared_memory_all_reduce() -> None:
    """
    On CPU DeepSpeed compiles and loads an all-reduce for inference, which training never calls.
    Each start of a worker would take the compiler's lock for it, and wait for ever for one that a
    killed worker has left.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_sharding(model: Model, config: ResolvedConfig) -> None:
    """Refuses what DeepSpeed would get wrong, or fail at, where it shards the optimizer."""
    if config.zero_stage == 0:
        return
    advice = f'ZeRO stage {config.zero_stage}; write "zero_optimization": {{"stage": 0}}'
    for name, module in model.named_modules():
        if config.zero_stage == 3 and isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"The module '{name}' is compiled by TorchScript, and ZeRO stage 3 can't gather "
                'parameters in its code. Write "deepspeed_config": {"zero_optimization": '
                "{\"stage\": 2}}, or leave out 'torch.jit'."
            )
        if getattr(module, "sparse", False) is True:
            raise ConfigurationError(
                f"The embedding '{name}' has \"sparse\": true, and DeepSpeed can't reduce sparse "
                f'gradients at {advice}, or "sparse": false.'
            )


def _init_group_of_one(device: torch.device) -> None:
    """
    DeepSpeed needs a process group even for one process. This one meets itself in memory, so that
    it needs no port.
    """
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )


def _undo_first_step(engine: DeepSpeedEngine) -> None:
    """
    To allocate the optimizer's state, DeepSpeed's optimizers for half precision at stage 0 make a
    step with gradients of zero. It counts as a step in Adam's bias correction, and weight decay
    changes the weights.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        engine.basic_optimizer.state.clear()
        # From the weights in half precision, which have not changed.
        optimizer.refresh_fp32_params()


def _keep_adagrad(engine: DeepSpeedEngine) -> None:
    """
    Adagrad has its state from the beginning. At stages 1 to 3 DeepSpeed makes another one for its
    shards, from the defaults and with one group. Learning rate schedules and everything else would
    act on the one that it was given. Where it keeps that one, the state is that of the parameters
    that it was given: on the CPU, or not of the weights that it steps.
    """
    given = engine.basic_optimizer
    if not isinstance(given, torch.optim.Adagrad):
        return
    optimizer = getattr(engine.optimizer, "optimizer", given)
    if optimizer is not given:
        given.state = optimizer.state
        engine.optimizer.optimizer = given
        if engine.zero_optimization_stage() < 3:
            engine.optimizer._link_all_hp_params()  # which it has done for the one group only
        return
    states = dict(given.state)
    given.state.clear()
    for group in given.param_groups:
        for weight in group["params"]:
            total = torch.full_like(weight, group["initial_accumulator_value"])
            state = states.get(weight, {"step": torch.tensor(0.0), "sum": total})
            given.state[weight] = {**state, "sum": state["sum"].to(weight.device)}


def _device_index(device: torch.device, local_rank: int) -> int:
    return local_rank if device.index is None else device.index


def _set_launcher_variables(device: torch.device, local_rank: int) -> None:
    """
    Sets what DeepSpeed expects from its launcher.

    `LOCAL_RANK` is the device's index: this is what DeepSpeed reads it for, and `"cuda_devices"`
    may start at any.
    """
    values = (dist.get_rank(), _device_index(device, local_rank), dist.get_world_size())
    os.environ.update(dict(zip(_LAUNCHER_VARIABLES, map(str, values))))


def _restore_environment(values: Dict[str, Optional[str]]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
