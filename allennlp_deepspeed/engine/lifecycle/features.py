"""
What is installed around `deepspeed.initialize`, which no other module calls, in order. All of it is
undone in reverse order when the engine is destroyed, or if a later feature can't be installed.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, NamedTuple, Optional, Tuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from allennlp.models.model import Model

from allennlp_deepspeed.config.deepspeed_config import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, get_accelerator
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.lifecycle import (
    activation_checkpointing,
    initialize_and_destroy,
    loss_scaling,
)
from allennlp_deepspeed.engine.lifecycle.compilation import Compiler
from allennlp_deepspeed.engine.lifecycle.half_precision import DTYPES, HalfPrecision
from allennlp_deepspeed.engine.optimizers import stepped_optimizers
from allennlp_deepspeed.engine.parameters import released_parameters, states_of_masters
from allennlp_deepspeed.engine.parameters.memory_format import support_any_layout
from allennlp_deepspeed.engine.parameters.model_check import moves_parameters
from allennlp_deepspeed.engine.parameters.model_snapshot import ModelSnapshot
from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.parameters.shared_attributes import SharedAttributes
from allennlp_deepspeed.engine.process import deepspeed_logging
from allennlp_deepspeed.engine.process.process_environment import (
    device_index,
    process_environment,
)
from allennlp_deepspeed.engine.zero3 import (
    gather_order,
    leaf_modules,
    module_calls,
    module_hooks,
)
from allennlp_deepspeed.engine.zero3.nested_autograd import refuse_inner_gradients
from allennlp_deepspeed.engine.zero3.regularization import (
    PartitionedRegularizer,
    compute_penalty_in_fp32,
)


@dataclass
class Setup:
    """
    State of an initialization, which features read and write.

    # Parameters

    model : `Model`
    config : `ResolvedConfig`
    device : `torch.device`
        The device of this worker.
    local_rank : `int`
    optimizer : `torch.optim.Optimizer`, optional
        `None` if DeepSpeed constructs it.
    compiler : `Compiler`, optional
        `None` if nothing is compiled.
    tear_down : `Callable[[Setup], None]`
        Destroys the engine, if there is one, and restores the model.
    """

    model: Model
    config: ResolvedConfig
    device: torch.device
    local_rank: int
    optimizer: Optional[torch.optim.Optimizer]
    compiler: Optional[Compiler]
    tear_down: Callable[["Setup"], None]

    engine: Optional[DeepSpeedEngine] = None
    """`None` before "initialize"."""
    is_alone: bool = False
    """Whether there is one process. The process group may be destroyed before the engine."""
    snapshot: Optional[ModelSnapshot] = None
    shared_attributes: Optional[SharedAttributes] = None
    regularizer: Optional[PartitionedRegularizer] = None
    parameters: Optional[Dict[str, torch.nn.Parameter]] = None
    """The parameters of the engine by name, each under all of its names."""
    must_resume: bool = False
    """Whether the optimizer's states are lost, and only a checkpoint can replace them."""
    in_precision: Callable[[Callable], Callable] = lambda forward: forward
    """Makes a forward pass run in the model's precision."""

    @property
    def stage(self) -> int:
        return self.config.zero_stage

    @property
    def is_half(self) -> bool:
        return self.config.precision in DTYPES

    @property
    def engine_optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer inside DeepSpeed's."""
        return self.initialized.basic_optimizer

    @property
    def initialized(self) -> DeepSpeedEngine:
        """Returns the engine, after "initialize"."""
        assert self.engine is not None
        return self.engine


Install = Callable[[Setup], Optional[ContextManager[Any]]]


class Feature(NamedTuple):
    """
    Part of an engine's initialization.

    # Parameters

    name : `str`
    install : `Callable[[Setup], Optional[ContextManager]]`
        Returns its undoing: a context manager that is entered now and left when the engine is
        destroyed, or `None`.
    applies : `Callable[[Setup], bool]`, optional
    """

    name: str
    install: Install
    applies: Callable[[Setup], bool] = lambda setup: True


def install_all(setup: Setup, undo: ExitStack) -> None:
    """
    Initializes the engine of `setup` with all features that apply. Every rank must call it.

    # Parameters

    setup : `Setup`, required.
    undo : `ExitStack`, required.
        It undoes what has been installed, also after an error.
    """
    for feature in FEATURES:
        if feature.applies(setup):
            undo.enter_context(feature.install(setup) or nullcontext())


# Before the engine exists


def _environment(setup: Setup) -> ContextManager[None]:
    return process_environment(setup.device, setup.local_rank)


def _access(setup: Setup) -> None:
    for parameter in setup.model.parameters():
        released_parameters.allow_access(parameter)


def _compile_forward(setup: Setup) -> ContextManager[Any]:
    assert setup.compiler is not None
    forward = setup.compiler.compile(setup.model.forward)
    return mock.patch.object(setup.model, "forward", forward)


def _half_precision(setup: Setup) -> ContextManager[None]:
    config = setup.config
    in_precision = HalfPrecision(
        setup.model, DTYPES[config.precision], setup.device.type, config.half_precision_autocast
    )
    setup.in_precision = in_precision
    return in_precision.installed(setup.model)


def _partition_regularizer(setup: Setup) -> ContextManager[Any]:
    setup.regularizer = PartitionedRegularizer(setup.model)
    return _call_at_exit(setup.regularizer.remove)


def _shared_attributes(setup: Setup) -> ContextManager[Any]:
    with released_parameters.access_allowed():  # an engine may have left some sharded
        setup.shared_attributes = SharedAttributes(setup.model)
        setup.shared_attributes.check(setup.stage, moves_parameters(setup.config) or "")
    return _call_at_exit(setup.shared_attributes.follow)


def _move_shared_attributes(setup: Setup) -> None:
    assert setup.shared_attributes is not None
    setup.shared_attributes.follow()


def _snapshot(setup: Setup) -> ContextManager[Any]:
    setup.snapshot = ModelSnapshot(setup.model, setup.optimizer)
    setup.is_alone = dist.get_world_size() == 1
    return _call_at_exit(setup.tear_down, setup)


def _allow_steps(setup: Setup) -> ContextManager[Any]:
    undo = ExitStack()
    has_lost_states = undo.enter_context(stepped_optimizers.allow_steps(setup.optimizer))
    setup.must_resume = has_lost_states
    return undo


def _sort_groups(setup: Setup) -> None:
    assert setup.optimizer is not None
    for group in setup.optimizer.param_groups:
        group["params"] = sorted(group["params"], key=lambda p: not p.requires_grad)


def _leaf_modules(setup: Setup) -> None:
    leaf_modules.declare(setup.model, setup.config.engine_config["zero_optimization"])


def _initialize(setup: Setup) -> None:
    has_stepped = stepped_optimizers.has_stepped(setup.optimizer)
    engine, *_ = deepspeed.initialize(
        # DeepSpeed uses the device's index as the local rank unless both are set.
        args=SimpleNamespace(local_rank=device_index(setup.device, setup.local_rank)),
        model=setup.model,
        optimizer=setup.optimizer,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        config=setup.config.engine_config,
    )
    setup.engine = engine
    setup.parameters = dict(setup.model.named_parameters(remove_duplicate=False))
    shards_states = engine.optimizer is not engine.basic_optimizer
    setup.must_resume |= has_stepped and shards_states


def _call_at_exit(function: Callable[..., Any], *args: Any) -> ContextManager[Any]:
    undo = ExitStack()
    undo.callback(function, *args)
    return undo


# With the engine


def _find_added(setup: Setup) -> None:
    assert setup.snapshot is not None
    setup.snapshot.find_added()


def _switch_modes(setup: Setup) -> None:
    """
    Makes `train` and `eval` of the engine set its own `training` too. In a single process the
    model's `eval` is called, as by AllenNLP, and not only its `train`.
    """
    engine = setup.initialized

    def train(mode: bool = True) -> None:
        engine.module.train(mode)
        engine.training = mode

    def evaluate() -> None:
        if setup.is_alone:
            engine.module.eval()
        else:
            engine.module.train(False)
        engine.training = False

    engine.train = train  # type: ignore[method-assign]
    engine.eval = evaluate  # type: ignore[method-assign]


def _gather_penalty(setup: Setup) -> None:
    assert setup.regularizer is not None
    setup.regularizer.gather_with_model()


def _correct_bias(setup: Setup) -> ContextManager[Any]:
    undo = ExitStack()
    for adam in initialize_and_destroy.adams_on_cpu(setup.engine_optimizer):
        undo.callback(initialize_and_destroy.correct_bias_by_step_count(adam))
    return undo


def _compile_leaf_modules(setup: Setup) -> ContextManager[Any]:
    assert setup.compiler is not None
    return setup.compiler.compile_leaf_modules(setup.model)


def _exclude_uncompilable(setup: Setup) -> ContextManager[Any]:
    assert setup.compiler is not None
    return setup.compiler.exclude_uncompilable(setup.model)


def _master_weights(setup: Setup) -> None:
    assert setup.snapshot is not None
    setup.snapshot.write_master_weights(setup.initialized)


def _forget_values(setup: Setup) -> None:
    assert setup.snapshot is not None
    setup.snapshot.forget_values(setup.initialized)


def _refuse_group(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "At ZeRO stages 1 to 3 parameters can't be added to the optimizer during training, "
        "because shards are fixed when the trainer is constructed. Construct them in the model's "
        "constructor, and write 'trainer.optimizer.parameter_groups'."
    )


# Where they apply


def _is_compiled(setup: Setup) -> bool:
    return setup.compiler is not None


def _at_stage_3(setup: Setup) -> bool:
    return setup.stage == 3


def _with_ranks_at_stage_3(setup: Setup) -> bool:
    return setup.stage == 3 and not setup.is_alone


def _with_gather_stream(setup: Setup) -> bool:
    return _with_ranks_at_stage_3(setup) and not get_accelerator().resolves_data_dependency()


def _with_shards(setup: Setup) -> bool:
    return setup.stage > 0


def _moves_parameters(setup: Setup) -> bool:
    return moves_parameters(setup.config) is not None


FEATURES: Tuple[Feature, ...] = (
    # First, so that it is undone last: the process group, variables and global state of DeepSpeed.
    Feature("process environment", _environment),
    Feature("parameters of any shape and layout", lambda s: support_any_layout()),
    Feature(
        "process environment of stage 3", lambda s: module_hooks.stage_3_environment(), _at_stage_3
    ),
    Feature("access to parameters that an earlier engine has sharded", _access),
    # Innermost of the wrappers of the forward pass: autocast isn't compiled.
    Feature("compiled forward pass", _compile_forward, lambda s: _is_compiled(s) and s.stage < 3),
    Feature("half precision", _half_precision, lambda s: s.is_half),
    # At stage 3 the partitioned regularizer does this.
    Feature(
        "penalty in fp32",
        lambda s: compute_penalty_in_fp32(s.model),
        lambda s: s.is_half and s.stage < 3,
    ),
    Feature("partitioned regularizer", _partition_regularizer, _at_stage_3),
    # Before the snapshot, so that they follow parameters when it has restored them.
    Feature("attributes that share memory", _shared_attributes, _moves_parameters),
    # After what changes the model, which it must not restore. Its undoing destroys the engine, so
    # that all that follows is undone while the engine exists.
    Feature("snapshot of the model", _snapshot),
    Feature("steps of an optimizer that had an engine", _allow_steps),
    # DeepSpeed leaves out frozen parameters, and reduces all in the dtype of the first.
    Feature(
        "trainable parameters first",
        _sort_groups,
        lambda s: s.stage > 0 and s.optimizer is not None,
    ),
    Feature("leaf modules", _leaf_modules, _with_ranks_at_stage_3),
    Feature("initialize", _initialize),
    Feature("memory of attributes", _move_shared_attributes, _moves_parameters),
    # Before hooks of this package are added, which the snapshot would take for DeepSpeed's.
    Feature("what DeepSpeed has added to the model", _find_added),
    Feature("modes of the engine and the model", _switch_modes),
    Feature("reports", lambda s: deepspeed_logging.log_reports(s.initialized)),
    Feature(
        "activation checkpointing",
        lambda s: activation_checkpointing.configure(s.model, s.config.engine_config, s.device),
    ),
    # Hooks of stage 3. Those that wrap others come after them.
    Feature(
        "outputs of any type", lambda s: module_hooks.support_any_output(s.initialized), _at_stage_3
    ),
    Feature(
        "copies without hooks",
        lambda s: internals.copy_modules_without_hooks(s.initialized.optimizer.parameter_offload),
        _at_stage_3,
    ),
    Feature(
        "hooks without a graph",
        lambda s: module_hooks.skip_hooks_without_graph(s.model),
        _at_stage_3,
    ),
    Feature("inner gradients", lambda s: refuse_inner_gradients(s.model), _at_stage_3),
    Feature(
        "inference mode", lambda s: module_hooks.support_inference_mode(s.initialized), _at_stage_3
    ),
    Feature(
        "gathers after writes",
        lambda s: gather_order.gather_after_writes(s.initialized),
        _with_gather_stream,
    ),
    Feature(
        "repeated calls of leaf modules",
        lambda s: module_hooks.support_repeated_leaf_calls(s.initialized),
        _at_stage_3,
    ),
    Feature(
        "end of a forward pass that fails",
        lambda s: module_hooks.end_forward_pass_on_error(s.model),
        _at_stage_3,
    ),
    Feature(
        "record of module calls",
        lambda s: module_calls.record_calls(s.model),
        _with_ranks_at_stage_3,
    ),
    Feature("parameters of the regularizer", _gather_penalty, _at_stage_3),
    # The optimizer, before its values are compared or written.
    Feature(
        "no step at the start",
        lambda s: initialize_and_destroy.undo_first_step(s.initialized),
        lambda s: s.is_half and s.stage == 0,
    ),
    Feature(
        "the given Adagrad",
        lambda s: initialize_and_destroy.keep_adagrad(s.initialized),
        lambda s: isinstance(s.engine_optimizer, torch.optim.Adagrad),
    ),
    Feature("steps by the engine only", lambda s: loss_scaling.refuse_other_steps(s.initialized)),
    Feature("bias correction by the step count", _correct_bias),
    Feature(
        "loss scale",
        lambda s: loss_scaling.fix_loss_scale(s.initialized),
        lambda s: s.config.precision == "fp16",
    ),
    Feature(
        "compiled leaf modules", _compile_leaf_modules, lambda s: _is_compiled(s) and s.stage == 3
    ),
    Feature("uncompilable parts", _exclude_uncompilable, _is_compiled),
    Feature("unrounded master weights", _master_weights, lambda s: s.is_alone and s.is_half),
    Feature("memory of the snapshot", _forget_values),
    Feature(
        "backward pass of a loss",
        lambda s: internals.allow_plain_backward(s.initialized),
        lambda s: s.stage == 0 and s.config.precision != "fp16",
    ),
    Feature(
        "fixed parameter groups",
        lambda s: mock.patch.object(s.engine_optimizer, "add_param_group", _refuse_group),
        _with_shards,
    ),
    Feature("one step of all groups", lambda s: Shards(s.initialized).steps_as_one(), _with_shards),
    # Last: from here on parameters have no elements outside of their modules.
    Feature(
        "no access to released parameters",
        lambda s: released_parameters.refuse_access_to_released(s.initialized),
        _at_stage_3,
    ),
    Feature(
        "parameters in groups",
        lambda s: Shards(s.initialized).parameters_in_param_groups(),
        _at_stage_3,
    ),
    Feature(
        "states of master weights",
        lambda s: states_of_masters.refuse_parameters_as_keys(s.initialized),
        lambda s: s.initialized.optimizer is not s.engine_optimizer,
    ),
)
"""All features, in the order in which they are installed."""
