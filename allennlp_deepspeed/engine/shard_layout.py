from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import safe_get_full_fp32_param

from allennlp_deepspeed.engine import weights


class Fragment(NamedTuple):
    """
    `size` elements of a parameter, from its `offset` on, which are in `master`, a tensor that the
    optimizer steps, from `start` on. At ZeRO stage 3 the last are followed by padding.
    """

    master: torch.Tensor
    start: int
    offset: int
    size: int


class ShardLayout:
    """
    Where the elements of a model's parameters are in the tensors that the optimizer steps: the
    parameters themselves or fp32 copies of them at ZeRO stage 0, this rank's fp32 shards at stages
    1 to 3. It gathers whole parameters, one at a time, and what is sharded like them.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._masters = {master: master for master in weights.master_shards(engine)}
        # But for parameters of which this rank has nothing.
        self._fragments: Dict[torch.nn.Parameter, Fragment] = dict(fragments(engine))
        self._is_sharded = any(
            is_zero_param(parameter) or hasattr(parameter, "_hp_mapping")
            for parameter in engine.module.parameters()
        )

    @property
    def needs_all_ranks(self) -> bool:
        """Whether it takes all ranks to gather something."""
        return self._is_sharded and dist.get_world_size() > 1

    def fragment(self, parameter: torch.nn.Parameter) -> Optional[Fragment]:
        """Where this rank has elements of a parameter. `None` if it has none that are stepped."""
        return self._fragments.get(parameter)

    def has_whole(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank has all of a parameter, as precise as the optimizer has it."""
        return not self.needs_all_ranks or (
            not is_zero_param(parameter) and parameter.dtype == torch.float32
        )

    def gather(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """
        A whole parameter in fp32, of the fp32 weights if it is trained. To be called by every rank,
        unless they have it whole.
        """
        if is_zero_param(parameter):
            if parameter.requires_grad:
                return safe_get_full_fp32_param(parameter)
            with zero.GatheredParameters([parameter]):
                # What was gathered outlives the parameter's use of it.
                return parameter.data.float()
        if parameter.requires_grad and parameter.dtype != torch.float32:
            return self.gather_alike(parameter, self._masters)
        return parameter.data.float()

    def gather_alike(
        self, parameter: torch.nn.Parameter, tensors: Mapping[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """
        The whole of what is sharded like a parameter, such as its gradient. To be called by every
        rank if `needs_all_ranks`.

        # Parameters

        parameter : `torch.nn.Parameter`, required.
            One that is trained.
        tensors : `Mapping[torch.Tensor, torch.Tensor]`, required.
            For a tensor that the optimizer steps one of the same size. What is missing is zero.

        # Returns

        `torch.Tensor`
            In fp32, of the parameter's whole shape.
        """
        if self._is_partitioned:
            part = _part(tensors, self._fragments[parameter])
            return self._engine.optimizer._fp32_state_allgather(parameter, part)
        fragment = self._fragments.get(parameter)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if fragment is not None:
            whole.narrow(0, fragment.offset, fragment.size).copy_(_part(tensors, fragment))
        if self._is_sharded:
            dist.all_reduce(whole, group=parameter._dp_group)  # type: ignore[attr-defined]
        return whole.view(parameter.shape)


def parameters_of_groups(engine: DeepSpeedEngine) -> List[List[torch.nn.Parameter]]:
    """The model's parameters in each of the `param_groups` of the optimizer."""
    groups = engine.basic_optimizer.param_groups
    if engine.zero_optimization_partition_weights():
        parameters: List[List[torch.nn.Parameter]] = [[] for _ in groups]
        for sub_group_id, sub_group in enumerate(engine.optimizer.fp16_groups):
            parameters[engine.optimizer.sub_group_to_group_id[sub_group_id]].extend(sub_group)
        return parameters
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(engine.optimizer, name):
            return getattr(engine.optimizer, name)
    return [group["params"] for group in groups]


def fragments(engine: DeepSpeedEngine) -> Iterator[Tuple[torch.nn.Parameter, Fragment]]:
    """What this rank has of each parameter in the tensors that the optimizer steps."""
    masters = weights.master_shards(engine)
    groups = engine.basic_optimizer.param_groups
    for group, parameters in zip(groups, parameters_of_groups(engine)):
        start = 0
        for i, parameter in enumerate(parameters):
            if is_zero_param(parameter):
                optimizer = engine.optimizer
                position = optimizer.grad_position[optimizer.get_param_id(parameter)]
                rank = dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
                offset = rank * position[2]
                yield parameter, Fragment(masters[position[0]], position[1], offset, position[2])
            elif not hasattr(parameter, "_hp_mapping"):
                is_flat = len(group["params"]) < len(parameters)
                master = group["params"][0 if is_flat else i]
                yield parameter, Fragment(master, start if is_flat else 0, 0, parameter.numel())
                start += parameter.numel()
            elif parameter._hp_mapping is not None:
                mapping = parameter._hp_mapping
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                master = masters[mapping.param_group_index]
                yield parameter, Fragment(master, here.start, there.start, here.numel)


def _part(tensors: Mapping[torch.Tensor, torch.Tensor], fragment: Fragment) -> torch.Tensor:
    if fragment.master not in tensors:
        return torch.zeros(fragment.size, device=fragment.master.device)
    return part_of(tensors[fragment.master], fragment)


def part_of(tensor: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    """The fragment's elements in a tensor that is like its `master`, such as a momentum."""
    return tensor.flatten().narrow(0, fragment.start, fragment.size)
