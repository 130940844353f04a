"""
Identifies frozen parameters that a file leaves out, and restores them from the constructed model.
"""

import hashlib
from typing import Any, Dict, List, Mapping, NamedTuple

import torch
from allennlp.common.checks import ConfigurationError

RECORDS_KEY = "frozen_parameters"
"""The entry of a `state_dict` with the records of the frozen parameters that it leaves out."""


class FrozenRecord(NamedTuple):
    """
    Identity of the weights of a frozen parameter that isn't in the file: its precision during
    training, such as "bfloat16", and a checksum.
    """

    dtype: str
    sha256: str

    @classmethod
    def from_weight(cls, weight: torch.Tensor) -> "FrozenRecord":
        contents = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        dtype = str(weight.dtype).rpartition(".")[2]
        return cls(dtype, hashlib.sha256(contents.numpy().data).hexdigest())

    @property
    def is_valid(self) -> bool:
        """Returns whether the precision is one of PyTorch's: a file may contain anything."""
        return isinstance(getattr(torch, self.dtype, None), torch.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class PretrainedWeightsError(ConfigurationError):
    """Raised if pretrained weights can't be loaded, or differ from those of the training."""


def check_same(
    actual: Mapping[str, FrozenRecord], expected: Mapping[str, FrozenRecord], source: str
) -> None:
    """
    Checks that the frozen parameters are the ones of the training.

    # Parameters

    actual : `Mapping[str, FrozenRecord]`, required.
        The records of the model.
    expected : `Mapping[str, FrozenRecord]`, required.
        The records of the training.
    source : `str`, required.
        The checkpoint or archive without them, for the message.

    # Raises

    `PretrainedWeightsError`
        If they differ.
    """
    different = sorted(
        name for name in {**actual, **expected} if actual.get(name) != expected.get(name)
    )
    if different:
        raise PretrainedWeightsError(
            f"{source} has no frozen parameters, and those of the model differ from the "
            f"original ones: {_listing(different)}. Load the same pretrained weights as before."
        )


def add_frozen_parameters(
    state_dict: Mapping[str, Any],
    model: torch.nn.Module,
    records: Mapping[str, FrozenRecord],
    source: str,
) -> Dict[str, Any]:
    """
    Adds the frozen parameters to a `state_dict` without them.

    # Parameters

    state_dict : `Mapping[str, Any]`, required.
        The state of a checkpoint or an archive, in fp32.
    model : `torch.nn.Module`, required.
        The model as it is before the first step.
    records : `Mapping[str, FrozenRecord]`, required.
        The records of the training.
    source : `str`, required.
        As for `check_same`.

    # Returns

    `Dict[str, Any]`
        The `state_dict` with the frozen parameters, in fp32.

    # Raises

    `PretrainedWeightsError`
        If the model's weights are not those of the training.
    """
    parameters = dict(model.named_parameters())
    weights = {
        id(parameter): parameter.detach().to(records[name].torch_dtype)
        for name, parameter in parameters.items()
        if name in records
    }
    actual = {
        name: FrozenRecord.from_weight(weights[id(parameter)])
        for name, parameter in parameters.items()
        if name in records
    }
    check_same(actual, records, source)
    in_fp32 = {key: _to_fp32(weight) for key, weight in weights.items()}
    ordered = {
        key: state_dict[key] if key in state_dict else in_fp32[id(value)]
        for key, value in model.state_dict(keep_vars=True).items()
        if key in state_dict or id(value) in in_fp32
    }
    return {**ordered, **state_dict}


def complete(state_dict: Mapping[str, Any], model: torch.nn.Module) -> Dict[str, Any]:
    """
    Adds the frozen parameters that an archive of adapters only leaves out to its `state_dict`, from
    a model as it is before the first step.

    # Raises

    `PretrainedWeightsError`
        If the model's weights are not those of the training.
    """
    state_dict = dict(state_dict)
    records = {name: FrozenRecord(*record) for name, record in state_dict.pop(RECORDS_KEY).items()}
    return add_frozen_parameters(state_dict, model, records, "The archive")


def _to_fp32(weight: torch.Tensor) -> torch.Tensor:
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight.float() if is_half else weight


def _listing(names: List[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
