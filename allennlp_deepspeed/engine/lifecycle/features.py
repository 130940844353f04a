"""
What is installed around `deepspeed.initialize`, which no other module calls. Each feature names the
features that must be installed before it. All of it is undone in reverse order when the engine is
destroyed, or if a later feature can't be installed.
"""

from contextlib import ExitStack, nullcontext
from graphlib import TopologicalSorter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, ContextManager, List, NamedTuple, Optional, Tuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.lifecycle import (
    activation_checkpointing,
    initialize_and_destroy,
    loss_scaling,
)
from allennlp_deepspeed.engine.lifecycle.half_precision import DTYPES, HalfPrecision
from allennlp_deepspeed.engine.optimizers import stepped_optimizers
from allennlp_deepspeed.engine.parameters import released_parameters, states_of_masters
from allennlp_deepspeed.engine.parameters.memory_format import support_any_layout
from allennlp_deepspeed.engine.parameters.model_check import moves_parameters
from allennlp_deepspeed.engine.parameters.model_snapshot import ModelSnapshot
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
    nvme_files,
)
from allennlp_deepspeed.engine.zero3.nested_autograd import refuse_inner_gradients
from allennlp_deepspeed.engine.zero3.regularization import (
    PartitionedRegularizer,
    compute_penalty_in_fp32,
)

if TYPE_CHECKING:
    from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel as Owner

# Undone last: the process group, variables and global state of DeepSpeed.
_ENVIRONMENT = ("process environment",)
# Its undoing destroys the engine, so that all that follows is undone while the engine exists.
_SNAPSHOT = ("snapshot of the model",)
# The snapshot would take hooks of this package for DeepSpeed's if they were added before.
_ADDED = ("what DeepSpeed has added to the model",)


class Feature(NamedTuple):
    """
    Part of an engine's initialization.

    # Parameters

    name : `str`
    install : `Callable[[DeepSpeedWrappedModel], Optional[ContextManager]]`
        Returns its undoing: a context manager that is entered now and left when the engine is
        destroyed, or `None`.
    applies : `Callable[[DeepSpeedWrappedModel], bool]`, optional
    after : `Tuple[str, ...]`, optional (default = `("what DeepSpeed has added to the model",)`)
        The names of the features that must be installed before, if they apply.
    """

    name: str
    install: Callable[["Owner"], Optional[ContextManager[Any]]]
    applies: Callable[["Owner"], bool] = lambda owner: True
    after: Tuple[str, ...] = _ADDED


def install_all(owner: "Owner", undo: ExitStack) -> None:
    """
    Initializes the engine of `owner` with all features that apply. Every rank must call it.

    # Parameters

    owner : `DeepSpeedWrappedModel`, required.
    undo : `ExitStack`, required.
        It undoes what has been installed, also after an error.
    """
    for feature in FEATURES:
        if feature.applies(owner):
            undo.enter_context(feature.install(owner) or nullcontext())


def in_order(*features: Feature) -> Tuple[Feature, ...]:
    """
    Sorts features by their `after`. Among those that may be next, the first of `features` is.

    # Raises

    `graphlib.CycleError`
        If features must be installed before each other.
    `ValueError`
        If `after` has a name that no feature has.
    """
    names = [feature.name for feature in features]
    sorter = TopologicalSorter({feature.name: feature.after for feature in features})
    sorter.prepare()
    ready: List[int] = []
    ordered: List[Feature] = []
    while sorter.is_active():
        ready = sorted([*ready, *map(names.index, sorter.get_ready())])
        ordered.append(features[ready.pop(0)])
        sorter.done(ordered[-1].name)
    return tuple(ordered)


# Before the engine exists


def _access(owner: "Owner") -> None:
    for parameter in owner.plain_model.parameters():
        released_parameters.allow_access(parameter)


def _compile_forward(owner: "Owner") -> ContextManager[Any]:
    assert owner.compiler is not None
    forward = owner.compiler.compile(owner.plain_model.forward)
    return mock.patch.object(owner.plain_model, "forward", forward)


def _half_precision(owner: "Owner") -> ContextManager[None]:
    config, model = owner.config, owner.plain_model
    owner.in_precision = in_precision = HalfPrecision(
        model, DTYPES[config.precision], owner.device.type, config.half_precision_autocast
    )
    return in_precision.installed(model)


def _partition_regularizer(owner: "Owner") -> ContextManager[Any]:
    owner.regularizer = PartitionedRegularizer(owner.plain_model)
    return _call_at_exit(owner.regularizer.remove)


def _shared_attributes(owner: "Owner") -> ContextManager[Any]:
    with released_parameters.access_allowed():  # an engine may have left some sharded
        owner.shared_attributes = SharedAttributes(owner.plain_model)
        owner.shared_attributes.check(owner.stage, moves_parameters(owner.config) or "")
    return _call_at_exit(owner.shared_attributes.follow)


def _snapshot(owner: "Owner") -> ContextManager[Any]:
    owner.snapshot = ModelSnapshot(owner.plain_model, owner.given_optimizer)
    owner.is_alone = dist.get_world_size() == 1
    return _call_at_exit(owner.tear_down)


def _allow_steps(owner: "Owner") -> ContextManager[Any]:
    undo = ExitStack()
    owner.must_resume = undo.enter_context(stepped_optimizers.allow_steps(owner.given_optimizer))
    return undo


def _sort_groups(owner: "Owner") -> None:
    assert owner.given_optimizer is not None
    for group in owner.given_optimizer.param_groups:
        group["params"] = sorted(group["params"], key=lambda p: not p.requires_grad)


def _leaf_modules(owner: "Owner") -> None:
    leaf_modules.declare(owner.plain_model, owner.config.engine_config["zero_optimization"])


def _initialize(owner: "Owner") -> None:
    has_stepped = stepped_optimizers.has_stepped(owner.given_optimizer)
    engine, *_ = deepspeed.initialize(
        # DeepSpeed uses the device's index as the local rank unless both are set.
        args=SimpleNamespace(local_rank=device_index(owner.device, owner.local_rank)),
        model=owner.plain_model,
        optimizer=owner.given_optimizer,
        model_parameters=[p for p in owner.plain_model.parameters() if p.requires_grad],
        config=owner.config.engine_config,
    )
    owner.engine = engine
    owner.must_resume |= has_stepped and engine.optimizer is not engine.basic_optimizer


def _call_at_exit(function: Callable[[], None]) -> ContextManager[Any]:
    undo = ExitStack()
    undo.callback(function)
    return undo


# With the engine


def _switch_modes(owner: "Owner") -> None:
    """
    Makes `train` and `eval` of the engine set its own `training` too. In a single process the
    model's `eval` is called, as by AllenNLP, and not only its `train`.
    """
    engine = owner.engine

    def train(mode: bool = True) -> None:
        engine.module.train(mode)
        engine.training = mode

    def evaluate() -> None:
        if owner.is_alone:
            engine.module.eval()
        else:
            engine.module.train(False)
        engine.training = False

    engine.train = train  # type: ignore[method-assign]
    engine.eval = evaluate  # type: ignore[method-assign]


def _compile_leaf_modules(owner: "Owner") -> ContextManager[Any]:
    assert owner.compiler is not None
    return owner.compiler.compile_leaf_modules(owner.plain_model)


def _exclude_uncompilable(owner: "Owner") -> ContextManager[Any]:
    assert owner.compiler is not None
    return owner.compiler.exclude_uncompilable(owner.plain_model)


def _refuse_group(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "At ZeRO stages 1 to 3 parameters can't be added to the optimizer during training, "
        "because shards are fixed when the trainer is constructed. Construct them in the model's "
        "constructor, and write 'trainer.optimizer.parameter_groups'."
    )


# Where they apply


def _is_half(owner: "Owner") -> bool:
    return owner.config.precision in DTYPES


def _is_compiled(owner: "Owner") -> bool:
    return owner.compiler is not None


def _at_stage_3(owner: "Owner") -> bool:
    return owner.stage == 3


def _with_ranks_at_stage_3(owner: "Owner") -> bool:
    return owner.stage == 3 and not owner.is_alone


def _with_gather_stream(owner: "Owner") -> bool:
    return _with_ranks_at_stage_3(owner) and not get_accelerator().resolves_data_dependency()


def _with_nvme(owner: "Owner") -> bool:
    zero = owner.config.engine_config.get("zero_optimization", {})
    sections = (zero.get("offload_param"), zero.get("offload_optimizer"))
    return owner.stage == 3 and any((each or {}).get("device") == "nvme" for each in sections)


def _moves_parameters(owner: "Owner") -> bool:
    return moves_parameters(owner.config) is not None


FEATURES = in_order(
    Feature(*_ENVIRONMENT, lambda o: process_environment(o.device, o.local_rank), after=()),
    Feature(
        "parameters of any shape and layout", lambda o: support_any_layout(), after=_ENVIRONMENT
    ),
    Feature(
        "process environment of stage 3",
        lambda o: module_hooks.stage_3_environment(),
        _at_stage_3,
        after=_ENVIRONMENT,
    ),
    Feature("access to parameters that an earlier engine has sharded", _access, after=_ENVIRONMENT),
    Feature(
        "compiled forward pass",
        _compile_forward,
        lambda o: _is_compiled(o) and o.stage < 3,
        after=_ENVIRONMENT,
    ),
    # Around the compiled forward pass: autocast isn't compiled.
    Feature("half precision", _half_precision, _is_half, after=("compiled forward pass",)),
    # At stage 3 the partitioned regularizer does this.
    Feature(
        "penalty in fp32",
        lambda o: compute_penalty_in_fp32(o.plain_model),
        lambda o: _is_half(o) and o.stage < 3,
        after=_ENVIRONMENT,
    ),
    Feature(
        "partitioned regularizer",
        _partition_regularizer,
        _at_stage_3,
        after=(
            "process environment of stage 3",
            "access to parameters that an earlier engine has sharded",
        ),
    ),
    Feature(
        "attributes that share memory", _shared_attributes, _moves_parameters, after=_ENVIRONMENT
    ),
    # It must not restore what others change in the model, and attributes follow what it restores.
    Feature(
        *_SNAPSHOT,
        _snapshot,
        after=(
            "parameters of any shape and layout",
            "half precision",
            "penalty in fp32",
            "partitioned regularizer",
            "attributes that share memory",
        ),
    ),
    Feature("steps of an optimizer that had an engine", _allow_steps, after=_SNAPSHOT),
    # DeepSpeed leaves out frozen parameters, and reduces all in the dtype of the first.
    Feature(
        "trainable parameters first",
        _sort_groups,
        lambda o: o.stage > 0 and o.given_optimizer is not None,
        after=_SNAPSHOT,
    ),
    Feature("leaf modules", _leaf_modules, _with_ranks_at_stage_3, after=_SNAPSHOT),
    Feature(
        "type of parameters on NVMe",
        lambda o: nvme_files.keep_dtype_of_parameters(),
        _with_nvme,
        after=_SNAPSHOT,
    ),
    Feature(
        "initialize",
        _initialize,
        after=(
            "steps of an optimizer that had an engine",
            "trainable parameters first",
            "leaf modules",
            "type of parameters on NVMe",
        ),
    ),
    Feature(
        "memory of attributes",
        lambda o: o.shared_attributes.follow(),
        _moves_parameters,
        after=("initialize",),
    ),
    Feature(*_ADDED, lambda o: o.snapshot.find_added(), after=("initialize",)),
    Feature("modes of the engine and the model", _switch_modes),
    Feature("reports", lambda o: deepspeed_logging.log_reports(o.engine)),
    Feature(
        "activation checkpointing",
        lambda o: activation_checkpointing.configure(
            o.plain_model, o.config.engine_config, o.device
        ),
    ),
    Feature(
        "misaligned gradients on NVMe",
        lambda o: nvme_files.keep_misaligned_gradients(o.engine),
        _with_nvme,
    ),
    Feature(
        "outputs of any type", lambda o: module_hooks.support_any_output(o.engine), _at_stage_3
    ),
    # Around the hooks of "outputs of any type", which copies must leave out too.
    Feature(
        "copies without hooks",
        lambda o: internals.copy_modules_without_hooks(o.engine.optimizer.parameter_offload),
        _at_stage_3,
        after=("outputs of any type",),
    ),
    Feature(
        "hooks without a graph",
        lambda o: module_hooks.skip_hooks_without_graph(o.plain_model),
        _at_stage_3,
    ),
    Feature("inner gradients", lambda o: refuse_inner_gradients(o.plain_model), _at_stage_3),
    Feature("inference mode", lambda o: module_hooks.support_inference_mode(o.engine), _at_stage_3),
    # Around "inference mode", which leaves it for the gathers.
    Feature(
        "gathers after writes",
        lambda o: gather_order.gather_after_writes(o.engine),
        _with_gather_stream,
        after=("inference mode",),
    ),
    Feature(
        "repeated calls of leaf modules",
        lambda o: module_hooks.support_repeated_leaf_calls(o.engine),
        _at_stage_3,
    ),
    Feature(
        "end of a forward pass that fails",
        lambda o: module_hooks.end_forward_pass_on_error(o.plain_model),
        _at_stage_3,
    ),
    Feature(
        "trace of module calls",
        lambda o: module_calls.trace_calls(o.plain_model),
        _with_ranks_at_stage_3,
    ),
    Feature(
        "parameters of the regularizer",
        lambda o: o.regularizer.gather_with_model(),
        _at_stage_3,
        after=("partitioned regularizer", *_ADDED),
    ),
    Feature(
        "no step at the start",
        lambda o: initialize_and_destroy.undo_first_step(o.engine),
        lambda o: _is_half(o) and o.stage == 0,
    ),
    Feature(
        "the given Adagrad",
        lambda o: initialize_and_destroy.keep_adagrad(o.engine),
        lambda o: isinstance(o.optimizer, torch.optim.Adagrad),
    ),
    Feature("steps by the engine only", lambda o: loss_scaling.refuse_other_steps(o.engine)),
    Feature(
        "loss scale",
        lambda o: loss_scaling.fix_loss_scale(o.engine),
        lambda o: o.config.precision == "fp16",
    ),
    Feature(
        "compiled leaf modules", _compile_leaf_modules, lambda o: _is_compiled(o) and o.stage == 3
    ),
    Feature("uncompilable parts", _exclude_uncompilable, _is_compiled),
    # "the given Adagrad" links the parameters of all groups to their shards, so that nothing may
    # ask for `shards` before. "no step at the start" would write the rounded weights.
    Feature(
        "unrounded master weights",
        lambda o: o.snapshot.write_master_weights(o.shards),
        lambda o: o.is_alone and _is_half(o),
        after=("no step at the start", "the given Adagrad"),
    ),
    Feature(
        "memory of the snapshot",
        lambda o: o.snapshot.forget_values(o.engine),
        after=("unrounded master weights",),
    ),
    Feature(
        "backward pass of a loss",
        lambda o: internals.allow_plain_backward(o.engine),
        lambda o: o.stage == 0 and o.config.precision != "fp16",
    ),
    Feature(
        "fixed parameter groups",
        lambda o: mock.patch.object(o.optimizer, "add_param_group", _refuse_group),
        lambda o: o.stage > 0,
    ),
    Feature(
        "one step of all groups",
        lambda o: o.shards.steps_as_one(),
        lambda o: o.stage > 0,
        after=("the given Adagrad",),
    ),
    # From here on parameters have no elements outside of their modules.
    Feature(
        "no access to released parameters",
        lambda o: released_parameters.refuse_access_to_released(o.engine),
        _at_stage_3,
        after=("parameters of the regularizer", "memory of the snapshot"),
    ),
    # Around "one step of all groups": both replace the optimizer's step of a group.
    Feature(
        "parameters in groups",
        lambda o: o.shards.parameters_in_param_groups(),
        _at_stage_3,
        after=("one step of all groups",),
    ),
    Feature(
        "states of master weights",
        lambda o: states_of_masters.refuse_parameters_as_keys(o.shards),
        lambda o: o.engine.optimizer is not o.optimizer,
        after=("the given Adagrad",),
    ),
)
"""All features, in the order in which they are installed."""
