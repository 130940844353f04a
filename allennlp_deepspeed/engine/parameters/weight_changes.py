import logging
import math
import operator
from contextlib import contextmanager
from itertools import compress
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, get_comm_dtype
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import (
    access_allowed,
    call_before_release,
)
from allennlp_deepspeed.engine.parameters.shards import Fragment, Shards
from allennlp_deepspeed.engine.parameters.shared_attributes import (
    ReleasedMemory,
    shared_attribute_error,
)
from allennlp_deepspeed.engine.process import collectives

logger = logging.getLogger(__name__)

# The number of elements to compare at a time, which needs memory for a copy of them on a GPU.
_ELEMENTS_AT_A_TIME = 2**24

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class WeightChangeDetector:
    """
    Detects weights that have been changed outside the optimizer where the change would be lost: the
    optimizer updates other tensors, from which the next step overwrites the model's weights.

    PyTorch counts in-place changes of a tensor. DeepSpeed's steps aren't counted, except in a group
    with a single parameter, where each step compares the weights and takes a new snapshot. Such
    changes are detected at the next reading of the losses, even if a step has overwritten them
    since.

    Changes through `.data` aren't counted either. So this rank's shards of the weights are also
    compared with the tensors that the optimizer updates: in the first step of an epoch, in each
    step that follows a reading of the losses, after an epoch, and before any other code writes or
    saves the weights, and in each step if a callback or a subclass of the trainer may change them.
    Otherwise a change through `.data`, which the model's forward pass makes in another step, is not
    detected.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._device = engine.device
        self._model = engine.module
        is_partitioned = engine.zero_optimization_partition_weights()
        self._named_parameters: List[Tuple[str, Any]] = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            # Frozen weights don't change where every rank has all of them.
            if parameter.requires_grad or is_partitioned
        ]
        shards = Shards(engine)
        if shards.steps_parameters:
            self._named_parameters = []
        # There are none on NVMe.
        has_fragments = self._named_parameters and not engine.zero_nvme_offload_optimizer()
        self._fragments = shards.fragments if has_fragments else {}
        # The flat buffer of a group with a single parameter is a view of it, so that PyTorch counts
        # the optimizer's own writes as changes of the parameter.
        self.is_due_each_step = not is_partitioned and any(len(g) == 1 for g in shards.groups)
        """Whether each step is to call `snapshot` when it ends."""
        self.is_due = True
        """Whether the next step is to call `compare_during_passes` and `compare_before_step`."""
        self._is_first_in_epoch = True
        self._compares_each_step = False
        # A release may lose a change.
        self._compares_before_release = is_partitioned and not engine.zero_quantized_weights()
        # The memory that the first step releases, until the second step looks for attributes in it.
        self._released_memory = ReleasedMemory() if is_partitioned else None
        self._records_released_memory = is_partitioned
        self._names = {parameter: name for name, parameter in self._named_parameters}
        # The versions of the shards that this step has compared before their release.
        self._compared: Dict[Any, int] = {}
        # Parameters and whether each differed, on the device until the next synchronization.
        self._differences: List[Tuple[List[str], torch.Tensor]] = []
        # The first parameter with a detected change.
        self._found: Optional[str] = None
        self.snapshot()

    def start_epoch(self, compares_each_step: bool) -> None:
        self.is_due = self._is_first_in_epoch = True
        self._compares_each_step = compares_each_step

    def snapshot(self) -> None:
        """Records the weights as unchanged."""
        self._versions = [self._versions_of(parameter) for _, parameter in self._named_parameters]

    def check(self) -> None:
        """
        Finds parameters whose changes PyTorch has counted since the last snapshot, or that have
        elements where stage 3 has released them. Must be called before a forward pass gathers them.
        """
        with access_allowed():
            for i, (name, parameter) in enumerate(self._named_parameters):
                before, self._versions[i] = self._versions[i], self._versions_of(parameter)
                version, version_of_partition = self._versions[i]
                if version == before[0] and not _is_replaced(parameter):
                    continue
                # A frozen parameter can be written through DeepSpeed's `GatheredParameters`.
                if parameter.requires_grad or version_of_partition == before[1]:
                    self._found = self._found or name

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """Context manager for code of this package that writes weights outside a step."""
        self.check()
        yield
        self.snapshot()

    @contextmanager
    def compare_during_passes(self) -> Iterator[None]:
        """
        Context manager for the forward and backward passes of a step. If a check is due, it calls
        `check`, and stage 3 compares each parameter when it first releases it: what a forward pass
        has written through `.data` is gone then.
        """
        if not self.is_due:
            yield
            return
        self.check()
        self._compared = {}
        if not self._compares_before_release:
            yield
            return
        with call_before_release(self._compare_before_release):
            yield

    def _compare_before_release(self, parameter: Any) -> None:
        name = self._names.get(parameter)
        if self._released_memory is not None and self._records_released_memory:
            self._released_memory.add(parameter)
        if name is not None and parameter not in self._compared:
            # What would have to be copied in each step is compared before the step.
            if self._is_first_in_epoch or self._is_on_its_device(parameter):
                self._compared[parameter] = parameter.ds_tensor._version
            self._compare([(name, parameter)], self._is_first_in_epoch)

    def _is_on_its_device(self, parameter: Any) -> bool:
        fragment = self._fragments.get(parameter)
        return fragment is None or fragment.master.device == parameter.device

    @property
    def _includes_offloaded(self) -> bool:
        """Returns whether weights are compared that have to be copied from or to the CPU."""
        return self._is_first_in_epoch or self._compares_each_step

    def compare_before_step(self) -> None:
        """
        Compares the weights that the passes haven't compared, or whose shards have been written
        since, as by `GatheredParameters`. Must be called before the optimizer step. It doesn't
        synchronize with the device.

        # Raises

        `ConfigurationError`
            In the second step at ZeRO stage 3, if an attribute has the memory that a parameter had
            in the first.
        """
        if self._released_memory is not None:
            self._check_attributes(self._released_memory)
        named_parameters = self._named_parameters
        if self._compared:
            named_parameters = [
                (name, parameter)
                for name, parameter in named_parameters
                if self._compared.get(parameter) != parameter.ds_tensor._version
            ]
        self._compare(named_parameters, self._includes_offloaded)
        self.is_due = (
            self.is_due_each_step or self._compares_each_step or self._released_memory is not None
        )
        self._is_first_in_epoch = False

    def _check_attributes(self, released_memory: ReleasedMemory) -> None:
        if self._records_released_memory:
            self._records_released_memory = False
            for _, parameter in self._named_parameters:
                if internals.is_gathered(parameter):
                    released_memory.add(parameter)
            return
        self._released_memory = None
        found = released_memory.find_attribute(self._model)
        if found is not None:
            name, parameter = found
            raise shared_attribute_error(name, self._names[parameter], "at ZeRO stage 3")

    def _compare(self, named_parameters: List[Tuple[str, Any]], includes_offloaded: bool) -> None:
        names: List[str] = []
        pairs: List[Tuple[torch.Tensor, torch.Tensor]] = []
        num_elements = 0
        for name, parameter in named_parameters:
            fragment = self._fragments.get(parameter)
            if fragment is None or fragment.size == 0:
                continue
            if includes_offloaded or fragment.master.device == parameter.device:
                pair = _different(parameter, fragment)
                if pair is not None:
                    names.append(name)
                    pairs.append(pair)
                    num_elements += fragment.size
            if num_elements > _ELEMENTS_AT_A_TIME:
                self._add_differences(names, pairs)
                names, pairs, num_elements = [], [], 0
        if pairs:
            self._add_differences(names, pairs)

    def _add_differences(
        self, names: List[str], pairs: List[Tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        # Few kernels for all parameters.
        differences = torch._foreach_sub(*zip(*pairs))
        norms = torch._foreach_norm(differences, math.inf)
        # Those of offloaded parameters may be on two devices.
        largest = torch.stack([norm.to(self._device) for norm in norms])
        # NaN, which is a separate error, isn't larger than 0.
        self._differences.append((names, largest > 0))

    def has_detected(self) -> bool:
        """Returns whether this rank has detected a change. It synchronizes with the device."""
        self.check()
        differences, self._differences = self._differences, []
        if differences:
            names = [name for names, _ in differences for name in names]
            are_different = torch.cat([are_different for _, are_different in differences]).tolist()
            self._found = self._found or next(compress(names, are_different), None)
        return self._found is not None

    def raise_error(self) -> NoReturn:
        """Raises an error. Every rank must call it if any `has_detected` a change."""
        found, self._found = self._found, None
        changed = "A parameter" if found is None else f"The parameter '{found}'"
        where = " on another rank" if found is None else ""
        raise RuntimeError(
            f"{changed} was changed outside the optimizer{where}. The optimizer updates master "
            "weights, and its next step would undo the change. Make it in a callback, within "
            "`with trainer.modified_weights():`, on every rank. In a forward pass, compute with a "
            "changed copy instead: `torch.clamp(weight, max=4.6)` for "
            "`weight.data.clamp_(max=4.6)`."
        )

    def warn_if_changed(self) -> None:
        """Warns of changes when there is no next step that would undo them."""
        self._compare(self._named_parameters, includes_offloaded=True)
        if self.has_detected():
            logger.warning(
                "The parameter '%s' was changed outside the optimizer after training, and the "
                "change is lost. Make it within `with trainer.modified_weights():`.",
                self._found,
            )
            self._found = None

    def raise_if_changed(self) -> None:
        """
        Checks for changes since the last step. It synchronizes with the device. Every rank must
        call it.

        # Raises

        `RuntimeError`
            On every rank, if any has detected a change.
        """
        self._compare(self._named_parameters, includes_offloaded=True)
        if collectives.all_reduce_any(self.has_detected(), self._device):
            self.raise_error()

    def _versions_of(self, parameter: Any) -> Tuple[int, int]:
        partition = parameter.ds_tensor._version if internals.is_sharded(parameter) else 0
        return parameter._version, partition


class RequiresGradDetector:
    """
    Detects parameters that have been frozen or unfrozen since the engine was constructed. Where the
    optimizer updates the model's parameters it skips those without a gradient. In all other cases
    they are shards of flat tensors, each of which is updated as one.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        shards = Shards(engine)
        self._steps_parameters = shards.steps_parameters
        tensors: List[Tuple[str, torch.Tensor]] = list(engine.module.named_parameters())
        if self._steps_parameters:
            stepped = {parameter for group in shards.groups for parameter in group}
            tensors = [(name, tensor) for name, tensor in tensors if tensor not in stepped]
        else:
            # A callback may find these in the optimizer's `param_groups`.
            for master, parameters in zip(shards.masters, shards.parameters_of_masters):
                tensors += [(shards.names[parameters[0]], master)] if parameters else []
        self._names = [name for name, _ in tensors]
        self._tensors = [tensor for _, tensor in tensors]
        self._requires_grad = [tensor.requires_grad for tensor in self._tensors]

    def check(self) -> None:
        """
        Checks `requires_grad` of all parameters. Must be called before each step.

        # Raises

        `RuntimeError`
            If `requires_grad` of a parameter has changed.
        """
        with access_allowed():
            requires_grad = list(map(_REQUIRES_GRAD, self._tensors))
        if requires_grad == self._requires_grad:
            return
        for name, before, now in zip(self._names, self._requires_grad, requires_grad):
            if before != now:
                self._raise(name, before)

    def _raise(self, name: str, was_trainable: bool) -> NoReturn:
        if self._steps_parameters:
            raise RuntimeError(
                f"The parameter '{name}' was unfrozen, but the optimizer doesn't have it. Leave "
                "it trainable in 'trainer.no_grad' and in the model's constructor, and let the "
                "callback freeze it in `on_start`."
            )
        raise RuntimeError(
            f"The parameter '{name}' was {'frozen' if was_trainable else 'unfrozen'} during "
            "training, which DeepSpeed doesn't support. Freeze it by 'trainer.no_grad', or write "
            '"deepspeed_config": {"zero_optimization": {"stage": 0}} without "bf16" and "fp16".'
        )


def _is_replaced(parameter: Any) -> bool:
    """Returns whether a released parameter, which has no elements, has been given elements."""
    return (
        internals.is_sharded(parameter)
        and internals.is_released(parameter)
        and parameter.numel() > 0
    )


def _different(parameter: Any, fragment: Fragment) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """
    Returns this rank's shard of the weights and of the tensor that the optimizer updates, in the
    dtype of the weights, or `None` if they are known to be the same, or can't be compared.
    """
    master = fragment.in_master(fragment.master.detach())
    if not internals.is_sharded(parameter):
        weights = fragment.in_full(parameter.detach())
    elif internals.is_gathered(parameter):
        # Under autocast they are gathered in lower precision.
        weights = fragment.in_full(parameter.detach()).to(get_comm_dtype(parameter))
    else:
        weights = parameter.ds_tensor.detach().flatten()[: fragment.size]
        if weights.numel() < fragment.size:
            return None  # on NVMe
    master = master.to(weights.device, weights.dtype)
    if weights.device.type == "cpu" and torch.equal(weights, master):
        return None  # found in one pass, where no synchronization is needed
    return weights, master
