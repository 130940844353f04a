"""
Reads checkpoints of any world size and any ZeRO stage, on one CPU and without a process group.
"""

import copy
import glob
import math
import os
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.utils._pytree import tree_leaves

from allennlp_deepspeed.checkpoint import serialization
from allennlp_deepspeed.checkpoint.checkpoint_directory import (
    ENGINE_TAG,
    CheckpointDirectory,
)
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.parameters.shards import Shards

ElementRange = Tuple[int, int]
"""A range of elements of a flattened parameter: the index of the first one, and their number."""

_PARAMETERS_OF_GROUPS = "parameters_of_groups"

_MODEL_FILES = "*mp_rank_00_model_states.pt"
_OPTIMIZER_FILES = "*_optim_states.pt"

_LOSS_SCALER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The counter attributes of the engine."""


def client_state(engine: DeepSpeedEngine) -> Dict[str, Any]:
    """
    Returns the `client_state` for `engine.save_checkpoint`: the names of the parameters in the
    optimizer's order. DeepSpeed saves them itself, except at stage 0.
    """
    if engine.zero_optimization():
        return {}
    return {_PARAMETERS_OF_GROUPS: Shards(engine).names_of_groups}


def names_of_groups(directory: str) -> List[List[str]]:
    """
    Returns the names of the parameters in each group of the optimizer, in the order in which they
    were saved. Needs the files of one rank only.

    # Parameters

    directory : `str`, required.
        A complete and undamaged checkpoint.
    """
    engine_directory = os.path.join(directory, ENGINE_TAG)
    model = _load(engine_directory, _MODEL_FILES, first_only=True)[0]
    optimizers = _load(engine_directory, _OPTIMIZER_FILES, first_only=True)
    if not optimizers:
        return [list(group) for group in _shapes_at_stage_0(engine_directory, model)]
    groups = _base_optimizer(optimizers[0]["optimizer_state_dict"])["param_groups"]
    shapes = model["param_shapes"]
    return [[name for index in group["params"] for name in shapes[index]] for group in groups]


class SavedFragment(NamedTuple):
    """
    Part of a parameter in a flat shard. All numbers count elements.

    # Parameters

    parameter : `str`
        Its name.
    start : `int`
        Offset of the part in the flattened parameter.
    shard_start : `int`
        Offset of the part in the shard.
    numel : `int`
    """

    parameter: str
    start: int
    shard_start: int
    numel: int


def partition_at_stage_3(
    shapes: Dict[str, torch.Size], rank: int, world_size: int
) -> Tuple[List[SavedFragment], int]:
    """
    Computes the partitions of ZeRO stage 3: each parameter is cut into `world_size` parts of equal
    size, the last ones padded, and a rank's shard contains its part of each.

    # Returns

    `Tuple[List[SavedFragment], int]`
        The fragments in the rank's shard, and the length of the shard.
    """
    fragments = []
    shard_start = 0
    for name, shape in shapes.items():
        size = math.ceil(shape.numel() / world_size)
        start = min(rank * size, shape.numel())
        numel = min(size, shape.numel() - start)
        fragments.append(SavedFragment(name, start, shard_start, numel))
        shard_start += size
    return fragments, shard_start


class _Shard(NamedTuple):
    """
    Tensor that one rank's optimizer updates as a unit: flat fp32 weights, and their optimizer
    states.
    """

    fragments: List[SavedFragment]
    master: torch.Tensor
    state: Dict[str, Any] = {}
    padding: int = 0
    """The number of elements by which states can be longer than the saved weights."""


class ShardedCheckpoint:
    """
    A checkpoint as its ranks wrote it. The constructor reads only metadata; tensors are read on
    access, one parameter at a time.

    # Parameters

    directory : `str`, required.
        A complete and undamaged checkpoint.
    rank : `int`, optional (default = `0`)
        The rank whose buffers and extra states are read.

    # Attributes

    directory : `str`
    world_size : `int`
        The number of ranks that wrote it.
    trainable : `Dict[str, torch.Size]`
        The shapes of the trainable parameters, by name. A tied parameter is listed under its first
        name.
    frozen : `Dict[str, torch.Size]`
        The shapes of the other parameters, unless the checkpoint leaves them out.
    module : `Dict[str, Any]`
        The `state_dict` of the model on `rank`. At stage 3 its parameters are empty.
    param_groups : `List[Dict[str, Any]]`
        The groups of the optimizer, with the names of their parameters. Empty at stage 0, where an
        engine can load the optimizer as it is.
    loss_scaler : `Dict[str, Any]`
        The state of the loss scaler that DeepSpeed's optimizer saves at stages 1 to 3.
    counters : `Dict[str, int]`
        The counters of the engine.
    lr_scheduler : `Optional[Dict[str, Any]]`
        The state of the scheduler in DeepSpeed's own section, if there is one.
    has_moving_average : `bool`

    # Raises

    `CheckpointError`
        If a file or a part of the data is missing.
    """

    def __init__(self, directory: str, rank: int = 0) -> None:
        self.directory = directory
        self._engine_directory = os.path.join(directory, ENGINE_TAG)
        models = _load(self._engine_directory, _MODEL_FILES)
        optimizers = [
            file["optimizer_state_dict"] for file in _load(self._engine_directory, _OPTIMIZER_FILES)
        ]
        model = models[rank if rank < len(models) else 0]
        self.world_size: int = model["dp_world_size"]
        if optimizers and len(optimizers) != self.world_size:
            raise CheckpointError(
                f"{self._engine_directory} has the optimizer states of {len(optimizers)} workers, "
                f"but {self.world_size} wrote it: the files of all nodes are needed."
            )
        self.module: Dict[str, Any] = model["module"]
        self._canonical_names = _canonical_names(self.module, model["buffer_names"])
        self.counters = {name: model[name] for name in COUNTERS}
        self.lr_scheduler: Optional[Dict[str, Any]] = model["lr_scheduler"]
        self.loss_scaler: Dict[str, Any] = {}
        self.param_groups: List[Dict[str, Any]] = []
        self._frozen_partitions: Dict[str, List[torch.Tensor]] = {}
        self._frozen_shapes: Dict[str, torch.Size] = {}
        if not optimizers:
            shapes = _shapes_at_stage_0(self._engine_directory, model)
            self._shards = [_shards_at_stage_0(model, shapes)]
        else:
            shapes = model["param_shapes"]
            self.loss_scaler = {
                key: optimizers[0][key] for key in _LOSS_SCALER_KEYS if key in optimizers[0]
            }
            if "fp32_flat_groups" not in optimizers[0]:
                self._shards = _shards_at_stages_1_and_2(optimizers)
            else:
                self._shards = _shards_at_stage_3(optimizers, shapes)
                self._frozen_shapes = model["frozen_param_shapes"] or {}
                self._frozen_partitions = {
                    name: [file["frozen_param_fragments"][name] for file in models]
                    for name in self._frozen_shapes
                }
            self.param_groups = [
                self._named(group) for group in _base_optimizer(optimizers[0])["param_groups"]
            ]
        self.trainable: Dict[str, torch.Size] = {n: s for group in shapes for n, s in group.items()}
        self.frozen: Dict[str, torch.Size] = {
            name: self._frozen_shapes.get(name, self.module[name].shape)
            for name in dict.fromkeys(self._canonical_names.values())
            if name not in self.trainable
        }
        # By parameter: rank, index of the shard, and position in the shard.
        self._places: Dict[str, List[Tuple[int, int, SavedFragment]]] = {
            n: [] for n in self.trainable
        }
        for rank, shards in enumerate(self._shards):
            for index, shard in enumerate(shards):
                for fragment in shard.fragments:
                    self._places[fragment.parameter].append((rank, index, fragment))
        self._moving_averages = self._load_moving_averages(directory)
        self.has_moving_average = self._moving_averages is not None

    def master(self, name: str, part: Optional[ElementRange] = None) -> torch.Tensor:
        """Returns the full weight of a trainable parameter, or a part of it, in fp32."""
        weight = self._assemble(name, lambda rank, index: self._shards[rank][index].master, part)
        return weight.float() if _is_half(weight) else weight

    def state_names(self, name: str) -> List[str]:
        """
        Returns the names of the element-wise optimizer states of a trainable parameter, such as
        Adam's moments.

        # Raises

        `CheckpointError`
            If a state is neither element-wise nor a scalar.
        """
        shard = self._first_shard(name)
        names = [key for key, value in shard.state.items() if not is_scalar(value)]
        lengths = (shard.master.numel(), shard.master.numel() + shard.padding)
        for key in names:
            value = shard.state[key]
            is_tensor = isinstance(value, torch.Tensor)
            if not is_tensor or value.dim() != 1 or value.numel() not in lengths:
                what = f"has shape {tuple(value.shape)}" if is_tensor else "is several tensors"
                raise CheckpointError(
                    f"In {self._engine_directory} the optimizer state '{key}' {what} for a shard "
                    f"of {lengths[0]} weights, which can't be resharded. Resume with the same "
                    f"number of workers ({len(self._shards)}), and layers in the same order."
                )
        return names

    def state(self, key: str, name: str, part: Optional[ElementRange] = None) -> torch.Tensor:
        """Returns one of the `state_names`, in the shape of the parameter, or a part of it."""
        return self._assemble(name, lambda rank, index: self._shards[rank][index].state[key], part)

    def scalars(self, name: str) -> Dict[str, Any]:
        """
        Returns copies of the optimizer states of a trainable parameter that aren't element-wise,
        such as the number of steps. Each has no tensors but those of one number.
        """
        state = self._first_shard(name).state
        # Copied, because optimizers count steps in place.
        return {k: copy.deepcopy(v) for k, v in state.items() if is_scalar(v)}

    def moving_average(self, name: str, part: Optional[ElementRange] = None) -> torch.Tensor:
        """
        Returns the moving average of a trainable parameter, or a part of it. The checkpoint must
        have one.
        """
        averages = self._moving_averages
        assert averages is not None
        return self._assemble(name, lambda rank, index: averages[rank][str(index)], part)

    def frozen_weight(self, name: str) -> torch.Tensor:
        """Returns the full weight of a frozen parameter, in the precision of the model."""
        if name not in self._frozen_partitions:
            return self.module[name]
        shape = self.frozen[name]
        parts = [part.flatten() for part in self._frozen_partitions[name]]
        if sum(part.numel() for part in parts) < shape.numel():
            raise CheckpointError(
                f"{self._engine_directory} lacks the weights of the frozen parameter {name}, which "
                "were on NVMe."
            )
        return torch.cat(parts)[: shape.numel()].view(shape)

    def state_dict(self) -> Dict[str, Any]:
        """
        Returns the `state_dict` of the same model on one CPU in fp32, with tied parameters tied.
        Where there is a moving average, it contains the averaged weights, which AllenNLP validates
        and archives. In addition to the result it needs the memory of one parameter.
        """
        weights: Dict[str, torch.Tensor] = {}
        state_dict: Dict[str, Any] = {}
        for key, value in self.module.items():
            name = self._canonical_names.get(key)
            if name is None:
                state_dict[key] = _to_fp32(value) if isinstance(value, torch.Tensor) else value
                continue
            if name not in weights:
                weights[name] = self._weight(name)
            state_dict[key] = weights[name]
        return state_dict

    def _weight(self, name: str) -> torch.Tensor:
        if name not in self.trainable:
            return _to_fp32(self.frozen_weight(name))
        return self.moving_average(name) if self.has_moving_average else self.master(name)

    def _assemble(
        self, name: str, tensor: Callable[[int, int], torch.Tensor], part: Optional[ElementRange]
    ) -> torch.Tensor:
        """
        Assembles a full parameter, or a part of it, from the shards.

        # Parameters

        name : `str`
        tensor : `Callable[[int, int], torch.Tensor]`
            Returns a tensor with the layout of a shard, given the rank and the shard's index.
        part : `Optional[ElementRange]`
            `None` for the full parameter, in its shape.
        """
        shape = self.trainable[name]
        offset, size = part or (0, shape.numel())
        rank, index, _ = self._places[name][0]
        values = torch.empty(size, dtype=tensor(rank, index).dtype)
        covered = 0
        for rank, index, fragment in self._places[name]:
            start = max(offset, fragment.start)
            numel = min(offset + size, fragment.start + fragment.numel) - start
            if numel > 0:
                shard_start = fragment.shard_start + start - fragment.start
                shard = tensor(rank, index).flatten().narrow(0, shard_start, numel)
                values.narrow(0, start - offset, numel).copy_(shard)
                covered += numel
        if covered != size:
            raise CheckpointError(
                f"{self._engine_directory} has {covered} of {size} weights of {name}."
            )
        return values if part else values.view(shape)

    def _first_shard(self, name: str) -> _Shard:
        rank, index, _ = self._places[name][0]
        return self._shards[rank][index]

    def _named(self, group: Dict[str, Any]) -> Dict[str, Any]:
        names = [
            fragment.parameter
            for shards in self._shards
            for index in group["params"]
            for fragment in shards[index].fragments
        ]
        return {**group, "params": list(dict.fromkeys(names))}

    def _load_moving_averages(self, directory: str) -> Optional[List[Dict[str, torch.Tensor]]]:
        path = CheckpointDirectory(os.path.dirname(directory)).training_state_path
        states = [
            serialization.load(path(directory, rank), mmap=True)
            for rank in range(len(self._shards))
        ]
        if "moving_average" not in states[0]:
            return None
        return [state["moving_average"]["shadows"] for state in states]


def _load(directory: str, pattern: str, first_only: bool = False) -> List[Dict[str, Any]]:
    """Loads the engine's files, in the order of the ranks: one per rank, or a single one."""
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), pattern)), key=_rank)
    if not paths and pattern == _MODEL_FILES:
        raise CheckpointError(f"DeepSpeed's files are missing in {directory}.")
    return [serialization.load(path, mmap=True) for path in (paths[:1] if first_only else paths)]


def _rank(path: str) -> int:
    _, separator, rank = os.path.basename(path).partition("zero_pp_rank_")
    return int(rank.split("_")[0]) if separator else 0


def _canonical_names(module: Dict[str, Any], buffers: List[str]) -> Dict[str, str]:
    """Maps each name of each parameter to its first name."""
    first: Dict[Any, str] = {}
    names = {}
    for name, value in module.items():
        is_extra_state = name.rpartition(".")[2] == "_extra_state"
        if isinstance(value, torch.Tensor) and name not in buffers and not is_extra_state:
            # A tied parameter has one storage under all its names, also at stage 3, where it is
            # empty.
            identity = (value.untyped_storage()._cdata, value.storage_offset(), value.shape)
            names[name] = first.setdefault(identity, name)
    return names


def _shapes_at_stage_0(directory: str, model: Dict[str, Any]) -> List[Dict[str, torch.Size]]:
    groups = model.get(_PARAMETERS_OF_GROUPS)
    if groups is None:
        raise CheckpointError(
            f"{directory} doesn't have the order of the optimizer's parameters: it was not written "
            "by this package's checkpointer."
        )
    return [{name: model["module"][name].shape for name in group} for group in groups]


def _shards_at_stage_0(model: Dict[str, Any], shapes: List[Dict[str, torch.Size]]) -> List[_Shard]:
    """
    Returns the shards that every rank has: the parameters or fp32 copies of them, flat or not.
    """
    optimizer = model["optimizer"]
    shards = []
    for i, group in enumerate(shapes):
        if "fp32_groups_flat" in optimizer:
            fragments = []
            start = 0
            for name, shape in group.items():
                fragments.append(SavedFragment(name, 0, start, shape.numel()))
                start += shape.numel()
            shards.append(_Shard(fragments, optimizer["fp32_groups_flat"][i]))
            continue
        masters = optimizer.get("fp32_groups")
        for j, (name, shape) in enumerate(group.items()):
            master = model["module"][name] if masters is None else masters[i][j]
            shards.append(_Shard([SavedFragment(name, 0, 0, shape.numel())], master))
    return shards


def _shards_at_stages_1_and_2(optimizers: List[Dict[str, Any]]) -> List[List[_Shard]]:
    """
    Returns one flat shard per rank and group: the rank's slice of the group's concatenated
    parameters. If a parameter crosses ranks, the lower rank has its earlier part.
    """
    ends: Dict[str, int] = defaultdict(int)
    shards: List[List[_Shard]] = []
    for optimizer in optimizers:
        shards.append([])
        for index, addresses in enumerate(optimizer["param_slice_mappings"]):
            fragments = []
            for name, address in addresses.items():
                fragments.append(SavedFragment(name, ends[name], address.start, address.numel))
                ends[name] += address.numel
            shards[-1].append(
                _Shard(
                    fragments,
                    optimizer["single_partition_of_fp32_groups"][index],
                    _base_optimizer(optimizer)["state"].get(index, {}),
                    optimizer["group_paddings"][index],
                )
            )
    return shards


def _shards_at_stage_3(
    optimizers: List[Dict[str, Any]], shapes: List[Dict[str, torch.Size]]
) -> List[List[_Shard]]:
    """
    Returns one flat shard per rank and sub-group: the rank's partitions of the sub-group's
    parameters.
    """
    shards: List[List[_Shard]] = []
    for rank, optimizer in enumerate(optimizers):
        shards.append([])
        for index, master in enumerate(optimizer["fp32_flat_groups"]):
            fragments, length = partition_at_stage_3(shapes[index], rank, len(optimizers))
            if length != master.numel():
                raise CheckpointError(
                    f"Rank {rank} of {len(optimizers)} has saved {master.numel()} weights of "
                    f"sub-group {index} instead of {length}: its ZeRO partitions are not those "
                    "of DeepSpeed 0.19."
                )
            state = _base_optimizer(optimizer)["state"].get(index, {})
            shards[-1].append(_Shard(fragments, master, state))
    return shards


def _base_optimizer(optimizer: Dict[str, Any]) -> Dict[str, Any]:
    return optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]


def is_scalar(value: Any) -> bool:
    """Returns whether a value has no tensors, at any depth, but those of one number."""
    return not any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in tree_leaves(value))


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, in fp32 if the tensor is in half precision."""
    return tensor.detach().to(torch.float32 if _is_half(tensor) else tensor.dtype, copy=True)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
