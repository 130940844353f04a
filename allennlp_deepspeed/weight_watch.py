from typing import Any, Collection, List, Optional, Tuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param

from allennlp_deepspeed.shard_layout import Fragment, ShardLayout

# Steps before which this rank's weights are compared, at first and in each epoch.
_FIRST_STEPS = 3


class WeightWatch:
    """
    Notices weights that have been changed outside the optimizer where the change would be lost: the
    optimizer steps other tensors, from which the next step writes the model's weights.

    PyTorch counts the changes of a tensor. Those through `.data` it doesn't, so that this rank's
    share of the weights is also compared with the tensors that the optimizer steps, before the
    first steps and then whenever `request_comparison` was called.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    except_for : `Collection[torch.nn.Parameter]`, required.
        Parameters whose changes somebody else takes care of.
    """

    def __init__(self, engine: DeepSpeedEngine, except_for: Collection[torch.nn.Parameter]) -> None:
        cared_for = set(map(id, except_for))
        is_partitioned = engine.zero_optimization_partition_weights()
        self._named_parameters: List[Tuple[str, Any]] = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if id(parameter) not in cared_for
            # What is frozen stays as it is where every rank has all of it.
            and (parameter.requires_grad or is_partitioned)
        ]
        if engine.optimizer is None or engine.optimizer is engine.basic_optimizer:
            self._named_parameters = []  # the optimizer steps them as they are
        self._layout: Optional[ShardLayout] = None
        if self._named_parameters and not engine.zero_nvme_offload_optimizer():
            self._layout = ShardLayout(engine)
        self._steps_in_epoch = 0
        self._is_requested = False
        # Whether each parameter was different, on the device until somebody waits for it anyway.
        self._differences: List[Tuple[str, torch.Tensor]] = []
        self.snapshot()

    def start_epoch(self) -> None:
        self._steps_in_epoch = 0

    def request_comparison(self) -> None:
        """Has the weights compared before the next step."""
        self._is_requested = True

    def snapshot(self) -> None:
        """Takes the weights as they are for unchanged."""
        self._versions = [_versions(parameter) for _, parameter in self._named_parameters]

    def check(self) -> None:
        """
        # Raises

        `RuntimeError`
            If a parameter has been changed since the last snapshot.
        """
        for (name, parameter), before in zip(self._named_parameters, self._versions):
            version, version_of_partition = _versions(parameter)
            if version == before[0] and not _is_replaced(parameter):
                continue
            # A frozen one can be written through DeepSpeed's `GatheredParameters`.
            if parameter.requires_grad or version_of_partition == before[1]:
                raise RuntimeError(_message(name))

    def compare(self) -> None:
        """To be called before each step. Doesn't wait for the device."""
        is_first = self._steps_in_epoch < _FIRST_STEPS
        self._steps_in_epoch += 1
        if self._layout is None or not (is_first or self._is_requested):
            return
        self._is_requested = False
        for name, parameter in self._named_parameters:
            fragment = self._layout.fragment(parameter)
            if fragment is None:
                continue
            # Not once a second over the bus.
            if is_first or fragment.master.device == parameter.device:
                difference = _difference(parameter, fragment)
                if difference is not None:
                    self._differences.append((name, difference))

    def read(self) -> None:
        """
        Waits for the device.

        # Raises

        `RuntimeError`
            If `compare` has found a difference.
        """
        differences, self._differences = self._differences, []
        if differences:
            is_different = torch.stack([difference for _, difference in differences]).tolist()
            for (name, _), differs in zip(differences, is_different):
                if differs:
                    raise RuntimeError(_message(name))


def _versions(parameter: Any) -> Tuple[int, int]:
    partition = parameter.ds_tensor._version if is_zero_param(parameter) else 0
    return parameter._version, partition


def _is_replaced(parameter: Any) -> bool:
    """Whether a partitioned parameter, which has no elements, has been given some."""
    return (
        is_zero_param(parameter)
        and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and parameter.numel() > 0
    )


def _difference(parameter: Any, fragment: Fragment) -> Optional[torch.Tensor]:
    """Whether this rank's share of the weights differs from what the optimizer steps."""
    master = fragment.master.detach().flatten().narrow(0, fragment.start, fragment.size)
    if not is_zero_param(parameter):
        weights = parameter.detach().flatten().narrow(0, fragment.offset, fragment.size)
    elif parameter.ds_status is ZeroParamStatus.AVAILABLE:
        start = fragment.offset
        weights = parameter.detach().flatten()[start : start + fragment.size]
        master = master[: weights.numel()]
    else:
        weights = parameter.ds_tensor.detach().flatten()
        if weights.numel() < fragment.size:
            return None  # on NVMe
    master = master.to(weights.device, weights.dtype)
    # NaN, which isn't equal to itself, is an error of its own.
    return ((weights != master) & (weights == weights)).any().to(parameter.device)


def _message(name: str) -> str:
    return (
        f"The parameter '{name}' has been changed outside the optimizer, which steps other tensors "
        "than the model's: the next step would undo the change. Make it, on every worker, within "
        "`with trainer.modified_weights():`."
    )
