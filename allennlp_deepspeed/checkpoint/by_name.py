"""
Saves and loads engines by the names of parameters: each rank writes the elements of weights and
optimizer states that it owns, and reads those that it owns now. So a checkpoint of any number of
workers, any order of parameters and any ZeRO stage is loaded into any other, as
`torch.distributed.checkpoint` does for PyTorch's own sharded tensors.
"""

import os
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch.utils._pytree import tree_leaves

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.checkpoint.state_files import (
    AVERAGE,
    BUFFER,
    STATE,
    WEIGHT,
    StateFiles,
    tensor_name,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.lifecycle import loss_scaling
from allennlp_deepspeed.engine.parameters import full_parameters
from allennlp_deepspeed.engine.parameters.shards import Shards, local_partition
from allennlp_deepspeed.engine.process import collectives

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")

_NUMBERS = (int, float, bool, str, type(None))

_OF_PYTORCH = ("state", "param_groups")

Groups = List[List[str]]
"""The names of the parameters in each group of the optimizer, in order."""


class EngineState(NamedTuple):
    """
    What a rank saves of an engine.

    # Parameters

    tensors : `Dict[str, torch.Tensor]`
    record : `Dict[str, Any]`
        Contents of the rank's file of `StateFiles`.
    rest : `Dict[str, Any]`
        What isn't of single parameters, or isn't a tensor, for the rank's training state.
    """

    tensors: Dict[str, torch.Tensor]
    record: Dict[str, Any]
    rest: Dict[str, Any]


def collect(
    shards: Shards,
    is_leader: bool,
    averages: Dict[str, torch.Tensor],
    excluded: Collection[str],
) -> EngineState:
    """
    Returns what this rank saves. The tensors are those of the training, not copies. Not a
    collective.

    # Parameters

    shards : `Shards`, required.
    is_leader : `bool`, required.
        Whether this rank saves what all ranks have.
    averages : `Dict[str, torch.Tensor]`, required.
        The moving averages of this rank's master weights, by their index.
    excluded : `Collection[str]`, required.
        The names of the parameters to leave out.
    """
    engine = shards.engine
    with shards.in_param_groups():
        optimizer = engine.basic_optimizer.state_dict()
    states = optimizer.get("state", {})
    tensors, record, others = _of_masters(shards, states, averages)
    if not (is_leader or shards.shards_optimizer):
        tensors, record = {}, {name: type(value)() for name, value in record.items()}
    fragments = record["fragments"]
    for parameter, name in shards.names.items():
        if parameter not in shards.trained and name not in excluded:
            fragment = local_partition(parameter)
            is_own = internals.is_sharded(parameter) and fragment.size > 0
            # Frozen weights on NVMe aren't in memory.
            if (is_own or is_leader) and fragment.master.numel() >= fragment.size:
                fragments[name] = (fragment.offset, fragment.size, -1)
                tensors[tensor_name(name, WEIGHT)] = fragment.in_master(fragment.master.detach())
    module, buffers, rest_of_module = _module_state(shards)
    if is_leader:
        tensors.update({tensor_name(key, BUFFER): value for key, value in buffers.items()})
    record["module"] = {k: v for k, v in module.items() if is_leader and k not in excluded}
    groups = optimizer.get("param_groups", [])
    rest = {
        "names_of_groups": shards.names_of_groups,
        "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
        "states": others,
        "optimizer": {
            **{key: value for key, value in optimizer.items() if key not in _OF_PYTORCH},
            "state": {key: value for key, value in states.items() if not isinstance(key, int)},
        },
        "module": rest_of_module,
        "loss_scale": loss_scaling.state_dict(engine),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "lr_scheduler": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
    }
    return EngineState(tensors, record, rest)


def _of_masters(
    shards: Shards, states: Dict[Any, Any], averages: Dict[str, torch.Tensor]
) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any], Dict[str, Dict[Any, Any]]]:
    """
    Returns the tensors of what the optimizer updates, their record, and the states that aren't
    tensors or numbers.
    """
    elementwise = _elementwise_keys(shards, states)
    tensors: Dict[str, torch.Tensor] = {}
    fragments: Dict[str, Tuple[int, int, int]] = {}
    numbers: Dict[str, Dict[str, Any]] = {}
    whole: List[str] = []
    others: Dict[str, Dict[Any, Any]] = {}
    for index, master in enumerate(shards.masters):
        state, names = states.get(index, {}), []
        values = {WEIGHT: master, AVERAGE: averages.get(str(index))}
        values.update({STATE + key: value for key, value in state.items() if key in elementwise})
        for parameter in shards.parameters_of_masters[index]:
            fragment, name = shards.fragments.get(parameter), shards.name_of(parameter)
            if fragment is not None:
                names.append(name)
                fragments[name] = (fragment.offset, fragment.size, index)
                for kind, value in values.items():
                    if value is not None:
                        tensors[tensor_name(name, kind)] = fragment.in_master(value.detach())
        for key, value in state.items():
            if key in elementwise or not names:
                continue
            is_tensor = _is_storable(value) and _is_kind(key)
            if is_tensor and value.dim() == 0:
                tensors.update({tensor_name(name, STATE + key): value for name in names})
            elif is_tensor:  # of the master weight, and saved with the first of its parameters
                whole.append(tensor_name(names[0], STATE + key))
                tensors[whole[-1]] = value.detach()
            elif type(value) in _NUMBERS and _is_kind(key):
                for name in names:
                    numbers.setdefault(name, {})[key] = value
            else:
                others.setdefault(names[0], {})[key] = value
    record = {
        "fragments": fragments,
        "numbers": numbers,
        "whole": whole,
        "others": {name: list(values) for name, values in others.items()},
    }
    return tensors, record, others


def _elementwise_keys(shards: Shards, states: Dict[Any, Any]) -> Set[str]:
    """Returns the keys of states that have the shape of their master weight."""
    found: Dict[str, bool] = {}
    for index, master in enumerate(shards.masters):
        # Not by a master weight of no dimension if there are others: a number of steps has none
        # either.
        if master.dim() > 0 or index == len(shards.masters) - 1 and not found:
            for key, value in states.get(index, {}).items():
                is_same = _is_storable(value) and value.shape == master.shape and _is_kind(key)
                found[key] = found.get(key, True) and is_same
    return {key for key, is_same in found.items() if is_same}


def _is_storable(value: Any) -> bool:
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return is_dense and value.dtype in files.SAFETENSORS_DTYPES


def _is_kind(key: Any) -> bool:
    return isinstance(key, str) and "|" not in key


def _module_state(
    shards: Shards,
) -> Tuple[Dict[str, Optional[str]], Dict[str, torch.Tensor], Dict[str, Any]]:
    """
    Returns the first name of the parameter of each key of the model's `state_dict`, or `None`, its
    buffers, and the rest of it.
    """
    names: Dict[str, Optional[str]] = {}
    buffers: Dict[str, torch.Tensor] = {}
    rest: Dict[str, Any] = {}
    names_of_parameters = shards.names
    for key, value in shards.engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.nn.Parameter) and value in names_of_parameters:
            names[key] = names_of_parameters[value]
        elif _is_storable(value):
            names[key], buffers[key] = None, value.detach()
        else:
            rest[key] = value
    return names, buffers, rest


def check_groups(path: str, saved: Groups, current: Groups) -> None:
    """
    Checks that each group of the optimizer has the parameters of the checkpoint, in any order.

    # Parameters

    path : `str`, required.
        The checkpoint, for messages.
    saved : `List[List[str]]`, required.
    current : `List[List[str]]`, required.
        The names of the parameters of each group.

    # Raises

    `CheckpointError`
        If a parameter is in another group, or was trained and is frozen now, or the reverse.
    """
    before, now = _group_of_each(saved), _group_of_each(current)
    for name in [name for group in [*saved, *current] for name in group]:
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"{path} can't be resumed: the parameter '{name}' was "
                f"{_describe(before.get(name), len(saved))} when it was saved, and is "
                f"{_describe(now.get(name), len(current))} now. Freeze the same parameters as then "
                "('trainer.no_grad', `requires_grad`) and keep "
                "'trainer.optimizer.parameter_groups', or export the weights (`allennlp deepspeed "
                f'export {os.path.dirname(path)}`) and start from them with "model": '
                '{"type": "from_archive", ...}.'
            )


def _group_of_each(groups: Groups) -> Dict[str, int]:
    return {name: index for index, group in enumerate(groups) for name in group}


def _describe(group: Any, num_groups: int) -> str:
    if group is None:
        return "frozen"
    return f"in parameter group {group} of the optimizer" if num_groups > 1 else "trained"


def refuse_tensors(path: str, states: Dict[str, Dict[str, Any]]) -> None:
    """
    Refuses states of other shards or of another order with tensors that may be of parameters.

    # Parameters

    path : `str`, required.
        The checkpoint, for messages.
    states : `Dict[str, Dict[str, Any]]`, required.
        The attributes of users' schedulers, moving averages and optimizers, by owner.

    # Raises

    `CheckpointError`
        If one has such tensors.
    """
    for owner, attributes in states.items():
        for name, value in attributes.items():
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if any(leaf.dim() > 0 for leaf in leaves):
                raise CheckpointError(
                    f"{path} can be resumed only with the same number of workers, at the same "
                    f"ZeRO stage, and layers in the same order: '{name}' of the {owner} has "
                    "tensors, which may be of parameters."
                )


def load(
    shards: Shards,
    saved: StateFiles,
    rest: Dict[str, Any],
    excluded: Collection[str],
    has_averages: bool,
) -> Dict[str, torch.Tensor]:
    """
    Loads weights, optimizer states, the loss scale, counters and DeepSpeed's own learning rate
    schedule. Must be called on every rank.

    # Parameters

    shards : `Shards`, required.
        Those of a newly constructed engine with the same model and the same optimizer, whose groups
        have the parameters of the checkpoint, in any order.
    saved : `StateFiles`, required.
    rest : `Dict[str, Any]`, required.
        The `rest` of an `EngineState` of the checkpoint.
    excluded : `Collection[str]`, required.
        The frozen parameters that are not in the checkpoint.
    has_averages : `bool`, required.
        Whether the training that was saved had a moving average.

    # Returns

    `Dict[str, torch.Tensor]`
        The moving averages of this rank's master weights, by their index, if there are any.

    # Raises

    `CheckpointError`
        On every rank, if optimizer states can't be loaded into these shards.
    """
    engine = shards.engine
    states: Dict[int, Dict[str, Any]] = {}
    problem = None
    try:
        for index in range(len(shards.masters)):
            states[index] = _read_state(shards, index, saved, rest["states"])
    except CheckpointError as error:
        problem = str(error)
    problems = collectives.gather_problems(problem)
    if problems:
        raise CheckpointError(problems[0])
    for index, master in enumerate(shards.masters):
        _read(master.data, shards, index, saved, WEIGHT)
    with shards.in_param_groups():
        optimizer = engine.basic_optimizer.state_dict()
        optimizer.update(rest["optimizer"])
        # AllenNLP's "multi" has those of its optimizers instead.
        if "param_groups" in optimizer:
            optimizer["state"] = {
                **rest["optimizer"]["state"],
                **{index: state for index, state in states.items() if state},
            }
            optimizer["param_groups"] = [
                {**of_checkpoint, "params": group["params"]}
                for of_checkpoint, group in zip(rest["param_groups"], optimizer["param_groups"])
            ]
        engine.basic_optimizer.load_state_dict(optimizer)
        _keep_types(engine.basic_optimizer.state, shards.masters, states)
    averages = {}
    for index, master in enumerate(shards.masters if has_averages else ()):
        if saved.has_average([shards.name_of(p) for p in shards.parameters_of_masters[index]]):
            averages[str(index)] = torch.zeros_like(master, requires_grad=False)
            _read(averages[str(index)], shards, index, saved, AVERAGE)
    if engine.zero_optimization_partition_weights():
        # Partitions the parameters that stage 3 has gathered persistently, until
        # `copy_masters_to_model`.
        engine.optimizer.checkpoint_event_prologue()
    _load_module(shards, {**saved.buffers(), **rest["module"]}, saved.directory)
    for parameter, name in shards.names.items():
        fragment = local_partition(parameter)
        is_in_memory = fragment.master.numel() >= fragment.size
        if parameter not in shards.trained and name not in excluded and is_in_memory:
            values = saved.read(name, WEIGHT, fragment.offset, fragment.size)
            fragment.fill(fragment.master.data, values)
    shards.copy_masters_to_model()
    loss_scaling.load_state_dict(engine, rest["loss_scale"])
    for name in _COUNTERS:
        setattr(engine, name, rest["counters"][name])
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(rest["lr_scheduler"])
    return averages


def _keep_types(
    states: Dict[Any, Dict[Any, Any]],
    masters: Sequence[torch.Tensor],
    saved: Dict[int, Dict[str, Any]],
) -> None:
    """
    Sets states that PyTorch's `load_state_dict` has converted to the type of their parameter, such
    as moments that an optimizer keeps in another one.
    """
    for index, values in saved.items():
        for key, value in values.items():
            loaded = states.get(masters[index], {}).get(key)
            # That of "step" depends on the kernel.
            if key == "step" or not isinstance(loaded, torch.Tensor):
                continue
            if isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                states[masters[index]][key] = value.to(loaded.device)


def _read(tensor: torch.Tensor, shards: Shards, index: int, saved: StateFiles, kind: str) -> None:
    """Reads this rank's elements of a master weight, or of a tensor with the same layout."""
    for parameter in shards.parameters_of_masters[index]:
        fragment = shards.fragments.get(parameter)
        if fragment is not None and fragment.size:
            name = shards.name_of(parameter)
            fragment.fill(tensor, saved.read(name, kind, fragment.offset, fragment.size))


def _read_state(
    shards: Shards, index: int, saved: StateFiles, others: Dict[str, Dict[Any, Any]]
) -> Dict[Any, Any]:
    """Returns the optimizer state of a master weight."""
    fragments = [
        (shards.name_of(parameter), shards.fragments[parameter])
        for parameter in shards.parameters_of_masters[index]
        if parameter in shards.fragments
    ]
    layout = [(name, fragment.offset, fragment.size) for name, fragment in fragments]
    if not fragments:
        return {}
    first, state = fragments[0][0], saved.state(fragments[0][0])
    for name, _ in fragments[1:]:
        other = saved.state(name)
        if (other.numbers, other.elementwise) != (state.numbers, state.elementwise):
            raise CheckpointError(
                f"{saved.directory} can be resumed only at the ZeRO stage, with the number of "
                "workers and with the order of layers that it was saved with: the optimizer's "
                f"numbers of '{first}' ({state.numbers or 'none'}) differ from those of '{name}' "
                f"({other.numbers or 'none'}), and it would have one state for both."
            )
    values = dict(state.numbers)
    for key, dtype in state.elementwise.items():
        values[key] = torch.zeros_like(shards.masters[index], dtype=dtype, requires_grad=False)
        _read(values[key], shards, index, saved, STATE + key)
    # In the same layout they are at the first parameter, and in another one they may be at any.
    for name, _ in fragments:
        state = saved.state(name)
        for key, tensor in state.whole.items():
            value = others.get(name, {}).get(key) if tensor is None else tensor
            if state.layout != layout or value is None:
                raise CheckpointError(
                    f"{saved.directory} can be resumed only at the ZeRO stage, with the number of "
                    f"workers and with the order of layers that it was saved with: the optimizer "
                    f"state '{key}' of '{name}' isn't element-wise."
                )
            values[key] = value
    return values


def _load_module(shards: Shards, values: Dict[str, Any], directory: str) -> None:
    """Loads what isn't a parameter: buffers and extra states."""
    module = shards.engine.module
    state_dict = module.state_dict(keep_vars=True)
    of_parameters, _, _ = _module_state(shards)
    current = {key for key in state_dict if of_parameters.get(key) is None}
    for key in sorted(current ^ values.keys()):
        where = "the checkpoint" if key in current else "the model"
        raise CheckpointError(
            f"{directory} is of another model: the buffer '{key}' isn't in {where}. Use the model "
            "of the checkpoint, or start again in another serialization directory."
        )
    of_module = full_parameters.empty_state_dict_like(state_dict)
    of_module.update(values)
    module.load_state_dict(of_module, strict=False)
