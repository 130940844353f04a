from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple

import torch
import torch.distributed as dist

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals


class Fragment(NamedTuple):
    """
    A parameter's elements that this rank has: `size` of them, in the flattened parameter from
    `offset` on, in the flattened `master` from `start` on. All numbers count elements.

    # Parameters

    master : `torch.Tensor`
        That the optimizer steps.
    start : `int`
    offset : `int`
    size : `int`
        0 where all that the rank has is padding.
    padding : `int`, optional (default = `0`)
        By which ZeRO stage 3, where each rank has as many elements, has more of them in `master`.
    """

    master: torch.Tensor
    start: int
    offset: int
    size: int
    padding: int = 0

    def in_master(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in `master`, or a tensor that is like it, such as a momentum. To be read."""
        return tensor.flatten().narrow(0, self.start, self.size)

    def write(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """
        # Parameters

        tensor : `torch.Tensor`
            `master`, or one that is like it, which gets the elements.
        whole : `torch.Tensor`
            One that is like the whole parameter, from which they are.
        """
        values = self.in_whole(whole)
        if tensor.is_contiguous():
            tensor.view(-1).narrow(0, self.start, self.size).copy_(values)
        else:
            # It is of one parameter then, with its strides, where nothing is sharded.
            tensor.copy_(values.view(tensor.shape))

    def in_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in a tensor that is like the whole parameter."""
        return tensor.flatten().narrow(0, self.offset, self.size)


class Shards:
    """
    Which parameters are in which group of the optimizer, and which slice of each is on this rank,
    at every ZeRO stage. What the optimizer steps are the model's parameters or fp32 copies of them
    at stage 0, this rank's flat fp32 shards at stages 1 to 3.

    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Attributes

    groups : `List[List[torch.nn.Parameter]]`
        The model's parameters in each of the optimizer's `param_groups`.
    masters : `List[torch.Tensor]`
        The tensors that the optimizer steps: one for each parameter or for each group, which
        stage 3 divides into sub-groups.
    parameters_of_masters : `List[List[torch.nn.Parameter]]`
        Those that share each of `masters`, on this rank or on another.
    fragments : `Dict[torch.nn.Parameter, Fragment]`
        What this rank has of the parameters in `masters`, but for those of which it has nothing.
    trained : `Set[torch.nn.Parameter]`
        All parameters in `groups`.
    names : `Dict[torch.nn.Parameter, str]`
        Of all parameters of the model. One with several names goes by the first.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._optimizer: Any = engine.optimizer
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._steps_parameters = engine.optimizer is engine.basic_optimizer
        self.names = {p: name for name, p in engine.module.named_parameters()}
        self._is_sharded = self._is_partitioned or hasattr(engine.optimizer, "update_lp_params")
        param_groups = [group["params"] for group in engine.basic_optimizer.param_groups]
        if self._is_partitioned:
            self._find_sub_groups(len(param_groups))
        else:
            self._find_groups(param_groups)
        self.trained = {parameter for group in self.groups for parameter in group}
        self.fragments: Dict[torch.nn.Parameter, Fragment] = {}
        for master, parameters in zip(self.masters, self.parameters_of_masters):
            self._find_fragments(master, parameters)

    def _find_sub_groups(self, num_groups: int) -> None:
        """At stage 3, whose shards are in `param_groups` only while they are stepped."""
        self.masters = list(self._optimizer.fp32_partitioned_groups_flat)
        self.parameters_of_masters = self._optimizer.fp16_groups
        self.groups: List[List[torch.nn.Parameter]] = [[] for _ in range(num_groups)]
        for index, sub_group in enumerate(self.parameters_of_masters):
            self.groups[self._optimizer.sub_group_to_group_id[index]].extend(sub_group)

    def _find_groups(self, param_groups: List[List[Any]]) -> None:
        self.groups = param_groups
        # Stages 1 and 2; bf16 with fp32 gradients at stage 1; half precision at stage 0.
        for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
            self.groups = getattr(self._optimizer, name, self.groups)
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self._optimizer, name):
                self.masters = list(getattr(self._optimizer, name))
                self.parameters_of_masters = self.groups
                return
        self.masters = [master for group in param_groups for master in group]
        is_flat = [len(params) < len(group) for params, group in zip(param_groups, self.groups)]
        self.parameters_of_masters = [
            parameters
            for group, flat in zip(self.groups, is_flat)
            for parameters in ([group] if flat else [[parameter] for parameter in group])
        ]

    def _find_fragments(self, master: torch.Tensor, parameters: List[Any]) -> None:
        start = 0
        for parameter in parameters:
            if self._is_partitioned:
                position = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                self.fragments[parameter] = _partition(parameter, master, *position[1:])
            elif not self._is_sharded:
                self.fragments[parameter] = Fragment(master, start, 0, parameter.numel())
                start += parameter.numel()
            elif (mapping := internals.fragment_mapping(parameter)) is not None:
                here = mapping.hp_fragment_address
                offset = mapping.lp_fragment_address.start
                self.fragments[parameter] = Fragment(master, here.start, offset, here.numel)

    @property
    def is_sharded(self) -> bool:
        """Whether the optimizer steps shards: whether this is stage 1, 2 or 3."""
        return self._is_sharded

    @property
    def steps_parameters(self) -> bool:
        """Whether what the optimizer steps are the model's parameters themselves."""
        return self._steps_parameters

    @property
    def names_of_groups(self) -> List[List[str]]:
        return [[self.names[parameter] for parameter in group] for group in self.groups]

    @contextmanager
    def in_memory(self, index: int) -> Iterator[torch.Tensor]:
        """
        Within it one of `masters`, by its index, has its elements, and the optimizer its states of
        them, also where they are on NVMe otherwise, to which they go back as they are then.
        """
        is_swapped = self._is_partitioned and internals.is_on_nvme(self._optimizer, index)
        if is_swapped:
            internals.read_from_nvme(self._optimizer, index)
        yield self.masters[index]
        if is_swapped:
            internals.write_to_nvme(self._optimizer, index)

    @contextmanager
    def in_param_groups(self) -> Iterator[None]:
        """Within it `masters` are in the optimizer's `param_groups`, as always but at stage 3."""
        if not self._is_partitioned:
            yield
            return
        internals.empty_param_groups(self._optimizer)  # Adagrad is made with them already
        internals.fill_param_groups(self._optimizer)
        try:
            yield
        finally:
            internals.empty_param_groups(self._optimizer)

    def update_parameters(self) -> None:
        """
        After a change of `masters`, gives the model the same weights. To be called by every rank.
        """
        if self._is_partitioned:
            self._optimizer.checkpoint_event_prologue()  # partitions what stage 3 keeps whole
            for index in range(len(self.masters)):
                with self.in_memory(index):
                    internals.copy_master_weights_to_model(self._optimizer, index)
            self._optimizer.checkpoint_event_epilogue()  # and gathers it again
        elif self._is_sharded:
            self._optimizer.update_lp_params()
        elif not self._steps_parameters:
            for parameter, fragment in self.fragments.items():
                whole = fragment.in_master(fragment.master.detach())
                parameter.data.copy_(whole.view(parameter.shape))


def own_partition(parameter: torch.nn.Parameter) -> Fragment:
    """
    What this rank has of a parameter for the model itself, in the precision that the model has:
    everything, or its partition at ZeRO stage 3.
    """
    if not internals.is_sharded(parameter):
        return Fragment(parameter, 0, 0, parameter.numel())
    partition = parameter.ds_tensor  # type: ignore[attr-defined]
    return _partition(parameter, partition, 0, partition.ds_numel)


def _partition(parameter: Any, tensor: torch.Tensor, start: int, length: int) -> Fragment:
    """Each rank has a part of the same length, of which the last may end in padding."""
    numel = whole_shape(parameter).numel()
    offset = min(dist.get_rank(parameter.ds_process_group) * length, numel)
    size = min(length, numel - offset)
    return Fragment(tensor, start, offset, size, padding=length - size)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """A tensor's shape, and that of a whole parameter which ZeRO-3 has partitioned."""
    # One that is partitioned is empty.
    return getattr(tensor, "ds_shape", tensor.shape)
