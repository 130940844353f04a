"""
Whether a case was trained as plain PyTorch trains it, or refused where it is to be.
"""

import math
import re
from typing import Any, Dict, List, Optional

import torch

from tests.cross.case import Case
from tests.cross.plain import Trained
from tests.cross.training import Finished

# Of the change of the weights that training makes: what a difference may be.
#
# In fp32 rounding makes some 1e-7 of each gradient, which following steps double a few times. bf16
# has 8 significant bits: each activation and each gradient is rounded by up to 2**-9, in some ten
# places one after another, and where the order of two sums differs, the last bit does. fp16 has 11
# bits. The fault that is smallest, one micro-batch that is lost or counts twice, makes more, which
# `python -m evidence cross` checks for each case.
TOLERANCE = {"fp32": 1e-5, "autocast": 0.03, "bf16": 0.03, "fp16": 0.005}
# The weights themselves are rounded too, in each step.
ROUNDING_OF_WEIGHTS = 2.0**-23


def problems(case: Case, finished: Finished, expected: Optional[Trained]) -> List[str]:
    """
    What is wrong. `expected` may be `None` if the case is to be refused.
    """
    if finished.failure is not None:
        return [f"failed: {finished.failure}"]
    key = expected_refusal(case)
    if finished.refusal is not None:
        if key is None:
            return [f"refused: {finished.refusal}"]
        if not re.search(key, finished.refusal):
            return [f"refused without naming {key}: {finished.refusal}"]
        return []
    if key is not None:
        return [f"trained, but {key} is to be refused"]
    assert expected is not None and finished.weights is not None
    found = [
        f"{name} differs by {difference:.2g} of its change"
        for name, difference in differences(case, finished.weights, expected).items()
        if not difference <= 1
    ]
    # Numbers of single steps, some of which are rounded worse than the sum of all.
    tolerance = TOLERANCE[case.precision] * (1 if case.precision == "fp32" else 4)
    for rank, (losses, plain) in enumerate(zip(finished.losses, expected.losses, strict=True)):
        found += _different_numbers(f"loss of rank {rank}", losses, plain, tolerance)
    if case.clipping in ("norm", "both", "reported"):
        found += _different_numbers("norm", finished.norms, expected.norms, tolerance)
    found += _different_numbers(
        "validation loss", finished.validation_losses, expected.validation_losses, tolerance
    )
    return found


def differences(
    case: Case, weights: Dict[str, torch.Tensor], expected: Trained
) -> Dict[str, float]:
    """Of each tensor, in multiples of what is allowed."""
    assert weights.keys() == expected.weights.keys()
    result = {}
    total, count = 0.0, 0
    for name, tensor in expected.weights.items():
        total += float((tensor.double() - expected.initial[name].double()).pow(2).sum())
        count += tensor.numel()
    for name, tensor in expected.weights.items():
        assert (weights[name].shape, weights[name].dtype) == (tensor.shape, tensor.dtype), name
        change = float((tensor.double() - expected.initial[name].double()).norm())
        if case.precision != "fp32":
            # Where a tensor's gradient is a small difference of large numbers, these are rounded.
            change = max(change, math.sqrt(total * tensor.numel() / count) / 2)
        difference = float((weights[name].double() - tensor.double()).norm())
        steps = sum(map(len, expected.losses[:1]))
        rounding = ROUNDING_OF_WEIGHTS * float(tensor.double().norm()) * math.sqrt(steps)
        allowed = TOLERANCE[case.precision] * change + rounding
        if not allowed:
            allowed = 0.0 if difference else 1.0
        result[name] = difference / allowed if allowed else math.inf
    return result


def _different_numbers(
    name: str, numbers: List[Any], expected: List[float], tolerance: float
) -> List[str]:
    if len(numbers) != len(expected):
        return [f"{len(numbers)} of {name} instead of {len(expected)}"]
    for step, (number, plain) in enumerate(zip(numbers, expected)):
        if number is None or not abs(number - plain) <= tolerance * max(1, abs(plain)):
            return [f"{name} of step {step} is {number} instead of {plain}"]
    return []


def expected_refusal(case: Case) -> Optional[str]:
    """
    A regular expression for the keys of which the message is to name one, if the case is to be
    refused.
    """
    refused = {
        "gradient_synchronization": case.synchronization == "micro_batch" and case.stage < 2,
        "find_unused_parameters": case.find_unused_parameters and case.stage == 3,
        "grad_cache": case.chunk_size is not None and "batch_norm" in case.parts,
        "offload_optimizer": case.offload is not None and case.stage == 0,
        "max_norm": "max_norm" in case.parts
        and (case.stage > 0 or case.precision in ("bf16", "fp16")),
        "Adagrad": case.optimizer == "adagrad" and case.precision in ("bf16", "fp16"),
        "is empty": case.stage == 3 and "empty" in case.parts,
        "offload_param": case.offload == "parameters" and case.stage < 3,
    }
    return "|".join(key for key, is_refused in refused.items() if is_refused) or None
