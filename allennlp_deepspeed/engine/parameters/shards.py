from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, NamedTuple

import torch
import torch.distributed as dist

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.optimizers.sub_group_steps import SubGroupSteps


class Fragment(NamedTuple):
    """
    This rank's elements of a parameter: `size` of them, from `offset` in the flattened parameter,
    and from `start` in the flattened `master`. All numbers count elements.

    # Parameters

    master : `torch.Tensor`
        The tensor that the optimizer updates.
    start : `int`
    offset : `int`
    size : `int`
        0 if the rank's partition is padding only.
    padding : `int`, optional (default = `0`)
        The number of padding elements in `master` at ZeRO stage 3, where all ranks have the same
        number of elements.
    """

    master: torch.Tensor
    start: int
    offset: int
    size: int
    padding: int = 0

    def in_master(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Returns the elements in `master`, or in a tensor of the same layout, such as a momentum.
        Read-only.
        """
        return tensor.flatten().narrow(0, self.start, self.size)

    def write(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        """
        Writes the elements of a full value into `master` or a tensor of the same layout.

        # Parameters

        tensor : `torch.Tensor`
            `master`, or a tensor of the same layout, which is written to.
        full : `torch.Tensor`
            A tensor of the layout of the full parameter, which is read.
        """
        self.fill(tensor, self.in_full(full))

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Writes these elements, which have one dimension, as `write` does."""
        if tensor.is_contiguous():
            tensor.view(-1).narrow(0, self.start, self.size).copy_(values)
        else:
            # It then belongs to one parameter, with its strides, and isn't sharded.
            tensor.copy_(values.view(tensor.shape))

    def in_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements in a tensor of the layout of the full parameter."""
        return tensor.flatten().narrow(0, self.offset, self.size)


class Shards:
    """
    Mapping of parameters to the optimizer's groups and to this rank's slices, at every ZeRO stage.
    At stage 0 the optimizer updates the model's parameters or fp32 copies of them, at stages 1 to 3
    this rank's flat fp32 shards. Only `DeepSpeedWrappedModel.shards` constructs it.

    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Attributes

    engine : `DeepSpeedEngine`
    groups : `List[List[torch.nn.Parameter]]`
        The model's parameters in each of the optimizer's `param_groups`.
    masters : `List[torch.Tensor]`
        The tensors that the optimizer updates: one for each parameter or for each group, which
        stage 3 divides into sub-groups.
    parameters_of_masters : `List[List[torch.nn.Parameter]]`
        The parameters that share each of `masters`, on this rank or on another.
    fragments : `Dict[torch.nn.Parameter, Fragment]`
        This rank's fragments of the parameters in `masters`, except parameters of which it has
        none.
    trained : `Set[torch.nn.Parameter]`
        All parameters in `groups`.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self._optimizer: Any = engine.optimizer
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self.steps_parameters = engine.optimizer is engine.basic_optimizer
        """Whether the optimizer updates the model's parameters themselves."""
        self.shards_optimizer = self._is_partitioned or hasattr(
            engine.optimizer, "update_lp_params"
        )
        """Whether the optimizer updates shards: at stages 1, 2 and 3."""
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
        """Finds the groups at stage 3, whose shards are in `param_groups` only during a step."""
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
            elif not self.shards_optimizer:
                self.fragments[parameter] = Fragment(master, start, 0, parameter.numel())
                start += parameter.numel()
            elif (mapping := internals.fragment_mapping(parameter)) is not None:
                here = mapping.hp_fragment_address
                offset = mapping.lp_fragment_address.start
                self.fragments[parameter] = Fragment(master, here.start, offset, here.numel)

    @property
    def names(self) -> Dict[torch.nn.Parameter, str]:
        """
        Returns the names of all parameters that the model has now, the first one of parameters with
        several names: those at the engine's construction, since a callback may tie or replace
        parameters later.
        """
        now = {p: name for name, p in self.engine.module.named_parameters()}
        return {**now, **self.engine.param_names}

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        return self.engine.param_names.get(parameter) or self.names[parameter]

    @property
    def names_of_groups(self) -> List[List[str]]:
        return [[self.name_of(parameter) for parameter in group] for group in self.groups]

    @contextmanager
    def in_memory(self, index: int) -> Iterator[torch.Tensor]:
        """
        Context manager in which one of `masters`, by its index, and its optimizer states are in
        memory. If they are on NVMe, they are read, and written back at exit.
        """
        is_swapped = self._is_partitioned and internals.is_on_nvme(self._optimizer, index)
        if is_swapped:
            internals.read_from_nvme(self._optimizer, index)
        yield self.masters[index]
        if is_swapped:
            internals.write_to_nvme(self._optimizer, index)

    @contextmanager
    def in_param_groups(self) -> Iterator[None]:
        """
        Context manager in which `masters` are in the optimizer's `param_groups`, as they always are
        except at stage 3.
        """
        if not self._is_partitioned:
            yield
            return
        internals.empty_param_groups(self._optimizer)  # Adagrad is constructed with them
        internals.fill_param_groups(self._optimizer)
        try:
            yield
        finally:
            internals.empty_param_groups(self._optimizer)

    @contextmanager
    def parameters_in_param_groups(self) -> Iterator[None]:
        """
        Context manager in which, at stage 3, the optimizer's `param_groups` have the model's
        parameters, except during a step and while states are saved or loaded. DeepSpeed leaves the
        groups empty, so that a callback that iterates over them would change nothing.
        """
        functions = internals.param_group_functions(self._optimizer)
        fill, empty, step = functions.values()

        def show_parameters() -> None:
            for group, parameters in zip(self._optimizer.param_groups, self.groups):
                group["params"] = list(parameters)

        def fill_with_shards() -> None:
            empty()
            fill()

        def step_sub_group(index: int) -> None:
            empty()
            step(index)
            show_parameters()

        own = (fill_with_shards, show_parameters, step_sub_group)
        with internals.replace_attributes(self._optimizer, **dict(zip(functions, own))):
            show_parameters()
            try:
                yield
            finally:
                empty()

    @contextmanager
    def steps_as_one(self) -> Iterator[None]:
        """
        Context manager in which all calls of the optimizer's `step` for its groups and sub-groups
        are one step.
        """
        if not (self._is_partitioned or hasattr(self._optimizer, "averaged_gradients")):
            yield
            return
        groups = getattr(self._optimizer, "sub_group_to_group_id", range(len(self.masters)))
        step_group = internals.step_of_group(self._optimizer)
        steps = SubGroupSteps(self._optimizer.optimizer)

        def step_sub_group(index: int) -> None:
            if index == 0:
                steps.start()
            steps.step_sub_group(groups[index], partial(step_group, index))
            if index == len(self.masters) - 1:
                steps.finish()

        with internals.replace_attributes(self._optimizer, _optimizer_step=step_sub_group):
            yield

    def optimizer_state(self, parameter: torch.nn.Parameter) -> Dict[str, Any]:
        """
        Returns the optimizer's state of a parameter. Tensors of the layout of its master are views
        of this rank's elements, which have one dimension.
        """
        fragment = self.fragments.get(parameter)
        if fragment is None:
            return {}
        master = fragment.master

        def own_elements(value: Any) -> Any:
            is_flat = isinstance(value, torch.Tensor) and value.shape == master.shape
            return fragment.in_master(value) if is_flat and value.numel() > fragment.size else value

        state = self.engine.basic_optimizer.state.get(master, {})
        return {name: own_elements(value) for name, value in state.items()}

    def copy_masters_to_model(self) -> None:
        """Copies `masters` to the model's weights after a change. Every rank must call it."""
        if self._is_partitioned:
            self._optimizer.checkpoint_event_prologue()  # partitions persistent parameters
            for index in range(len(self.masters)):
                with self.in_memory(index):
                    internals.copy_master_weights_to_model(self._optimizer, index)
            self._optimizer.checkpoint_event_epilogue()  # and gathers them again
        elif self.shards_optimizer:
            self._optimizer.update_lp_params()
        elif not self.steps_parameters:
            for parameter, fragment in self.fragments.items():
                full = fragment.in_master(fragment.master.detach())
                parameter.data.copy_(full.view(parameter.shape))


def local_partition(parameter: torch.nn.Parameter) -> Fragment:
    """
    Returns this rank's fragment of a parameter in the model's precision: all elements, or its
    partition at ZeRO stage 3.
    """
    if not internals.is_sharded(parameter):
        return Fragment(parameter, 0, 0, parameter.numel())
    partition = parameter.ds_tensor  # type: ignore[attr-defined]
    return _partition(parameter, partition, 0, partition.ds_numel)


def _partition(parameter: Any, tensor: torch.Tensor, start: int, length: int) -> Fragment:
    """Returns a rank's fragment."""
    # All partitions have the same length, and the last may end in padding.
    numel = full_shape(parameter).numel()
    offset = min(dist.get_rank(parameter.ds_process_group) * length, numel)
    size = min(length, numel - offset)
    return Fragment(tensor, start, offset, size, padding=length - size)


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """Returns a tensor's shape, for a parameter that ZeRO-3 has partitioned the full shape."""
    return internals.full_shape(tensor) if internals.is_sharded(tensor) else tensor.shape
