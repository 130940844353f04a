import logging
import math
import time
from collections import deque
from contextlib import contextmanager
from itertools import compress
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import get_comm_dtype
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import (
    access_allowed,
    call_before_release,
)
from allennlp_deepspeed.engine.parameters.shards import Fragment, Shards
from allennlp_deepspeed.engine.parameters.shared_attributes import ReleasedMemory

logger = logging.getLogger(__name__)

# Of the time of training, for comparisons that the reading of losses asks for.
_SHARE_OF_TIME = 0.01
# Of the last comparisons the shortest is what one takes: others may have waited for the processor.
_NUM_TIMED = 3

# The number of elements to compare at a time, which needs memory for a copy of them on a GPU.
_ELEMENTS_AT_A_TIME = 2**24


class WeightChangeDetector:
    """
    Detects weights that have been changed outside the optimizer where the change would be lost: the
    optimizer updates other tensors, from which the next step overwrites the model's weights.

    PyTorch counts in-place changes of a tensor. DeepSpeed's steps aren't counted, except in a group
    with a single parameter, where each step compares the weights and marks them as unchanged. Such
    changes are detected at the next reading of the losses, even if a step has overwritten them
    since.

    Changes through `.data` aren't counted either. So this rank's shards of the weights are also
    compared with the tensors that the optimizer updates: in the first step of an epoch, in each
    step after which the losses are read, after an epoch, and before any other code writes or
    saves the weights, and in each step if a callback or a subclass of the trainer may change them.
    Otherwise a change through `.data`, which the model's forward pass makes in another step, is not
    detected. Where comparisons for the reading of losses would take more than 1 % of the time, they
    are left out until they don't.

    # Parameters

    shards : `Shards`, required.
    agree : `Callable[[], Any]`, required.
        Compares all that must not change with all ranks: it calls `pop_changed`, and raises an
        error on every rank if a weight or anything else has changed on any.
    """

    def __init__(self, shards: Shards, agree: Callable[[], Any]) -> None:
        engine = shards.engine
        self._device, self._agree = engine.device, agree
        self._model = engine.module
        is_partitioned = engine.zero_optimization_partition_weights()
        self._named_parameters: List[Tuple[str, Any]] = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            # Frozen weights don't change where every rank has all of them.
            if parameter.requires_grad or is_partitioned
        ]
        if shards.steps_parameters:
            self._named_parameters = []
        # There are none on NVMe.
        has_fragments = self._named_parameters and not engine.zero_nvme_offload_optimizer()
        self._fragments = shards.fragments if has_fragments else {}
        # The flat buffer of a group with a single parameter is a view of it, so that PyTorch counts
        # the optimizer's own writes as changes of the parameter.
        self.is_due_each_step = not is_partitioned and any(len(g) == 1 for g in shards.groups)
        """Whether each step is to call `mark_unchanged` when it ends."""
        self.is_due = True
        """Whether the step is to call `compare_during_passes` and `compare_before_step`."""
        self._is_first_in_epoch = True
        self._compares_each_step = False
        self._seconds: Deque[float] = deque(maxlen=_NUM_TIMED)
        self._seconds_in_step = 0.0
        self._next_time = 0.0
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
        self.shared_attributes: Dict[str, Any] = {}
        """An attribute with the memory that a parameter had in the first step at ZeRO stage 3."""
        self.has_compared = False
        """Whether all weights have been compared since an owner of this object has reset it."""
        # The first parameter with a detected change.
        self._found: Optional[str] = None
        self.mark_unchanged()

    def start_epoch(self, compares_each_step: bool) -> None:
        self.is_due = self._is_first_in_epoch = True
        self._compares_each_step = compares_each_step

    def request(self) -> None:
        """Asks for a comparison in this step, unless the last one was too recent."""
        self.is_due = self.is_due or time.monotonic() >= self._next_time

    def mark_unchanged(self) -> None:
        """Records the weights as unchanged."""
        self._versions = [self._versions_of(parameter) for _, parameter in self._named_parameters]

    def check(self) -> None:
        """
        Finds parameters whose changes PyTorch has counted since they were last marked as unchanged,
        or that have elements where stage 3 has released them. Must be called before a forward pass
        gathers them.
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
        self.mark_unchanged()

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
        self._compared, self._seconds_in_step = {}, 0.0
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
        synchronize with the device. In the second step at ZeRO stage 3 it also looks for a
        shared attribute.
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
        self.has_compared = True
        self._compare(named_parameters, self._includes_offloaded)
        if not self._is_first_in_epoch:  # which may include more
            self._seconds.append(self._seconds_in_step)
            self._next_time = time.monotonic() + min(self._seconds) / _SHARE_OF_TIME
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
            attribute, parameter = found
            name = f"'{attribute}' with memory of the parameter '{self._names[parameter]}'"
            self.shared_attributes = {name: parameter}

    def _compare(self, named_parameters: List[Tuple[str, Any]], includes_offloaded: bool) -> None:
        start = time.monotonic()
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
            else:
                self.has_compared = False
            if num_elements > _ELEMENTS_AT_A_TIME:
                self._add_differences(names, pairs)
                names, pairs, num_elements = [], [], 0
        if pairs:
            self._add_differences(names, pairs)
        self._seconds_in_step += time.monotonic() - start

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

    def pop_changed(self) -> Dict[str, bool]:
        """
        Returns `True` by the name of a parameter, if one has been changed on this rank since the
        last call. It synchronizes with the device.
        """
        self.check()
        differences, self._differences = self._differences, []
        if differences:
            names = [name for names, _ in differences for name in names]
            are_different = torch.cat([are_different for _, are_different in differences]).tolist()
            self._found = self._found or next(compress(names, are_different), None)
        found, self._found = self._found, None
        return {} if found is None else {found: True}

    def warn_if_changed(self) -> None:
        """Warns of changes when there is no next step that would undo them."""
        self.compare()
        for found in self.pop_changed():
            logger.warning(
                "The parameter '%s' was changed outside the optimizer after training, and the "
                "change is lost. Make it within `with trainer.modified_weights():`.",
                found,
            )

    def compare(self) -> None:
        """Compares all weights."""
        self.has_compared = True
        self._compare(self._named_parameters, includes_offloaded=True)

    def raise_if_changed(self) -> None:
        """
        Checks for changes since the last step. It synchronizes with the device. Every rank must
        call it.

        # Raises

        `RuntimeError`
            On every rank, if any has detected a change.
        """
        self.compare()
        self._agree()

    def _versions_of(self, parameter: Any) -> Tuple[int, int]:
        partition = parameter.ds_tensor._version if internals.is_sharded(parameter) else 0
        return parameter._version, partition


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
