import copy
from typing import Any, Dict

import pytest
import torch
from allennlp.common import Params
from allennlp.training.optimizers import Optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from allennlp_deepspeed.engine.lifecycle.initialize_and_destroy import (
    adams_on_cpu,
    correct_bias_by_step_count,
)

NUM_STEPS = 60


def weights_after_steps(
    optimizer_class: Any, settings: Dict[str, Any], is_interrupted: bool
) -> torch.Tensor:
    """Of one parameter, by an optimizer or by two of which the second goes on with the states."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(500, generator=generator))
    optimizer = optimizer_class([weight], lr=0.1, **settings)
    for step in range(NUM_STEPS):
        if step in (0, NUM_STEPS // 2) and (step == 0 or is_interrupted):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_class([weight], lr=0.1, **settings)
            optimizer.load_state_dict(state)
            if isinstance(optimizer, FusedAdam):
                # Its operator has one state in a process: as it is in a new one, without betas.
                nothing = [[torch.empty(0)]] * 4
                mode = optimizer.adam_w_mode
                optimizer.multi_tensor_adam(0, torch.empty(0), nothing, 0, 0, 0, 0, 0, mode, 0, 0)
            undo = correct_bias_by_step_count(optimizer)
        weight.grad = torch.randn(500, generator=generator)
        optimizer.step()
    undo()
    assert not optimizer._optimizer_step_pre_hooks
    return weight.detach()


@pytest.mark.parametrize(
    "optimizer_class, settings",
    [
        (DeepSpeedCPUAdam, {}),
        (DeepSpeedCPUAdam, {"adamw_mode": False, "weight_decay": 0.1}),
        (FusedAdam, {}),
        (FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}),
    ],
)
def test_steps_after_an_interruption_are_those_of_one_optimizer(
    optimizer_class: Any, settings: Dict[str, Any]
) -> None:
    """To the last bit. That DeepSpeed's Adam as it is rounds otherwise, tests/upstream shows."""
    expected = weights_after_steps(optimizer_class, settings, is_interrupted=False)
    assert torch.equal(
        weights_after_steps(optimizer_class, settings, is_interrupted=True), expected
    )


def test_each_optimizer_of_several_is_corrected() -> None:
    """As `optimizer` is "multi", at stage 0."""
    parameters = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("one", "other")]
    optimizers = {"default": {"type": "cpu_adam", "lr": 0.1}, "second": {"type": "fused_adam"}}
    groups = [[["other"], {"optimizer_name": "second"}]]
    several = Optimizer.from_params(
        Params({"type": "multi", "optimizers": optimizers, "parameter_groups": groups}),
        model_parameters=parameters,
    )
    parts = list(several.optimizers.values())
    assert isinstance(parts[0], DeepSpeedCPUAdam) and isinstance(parts[1], FusedAdam)
    assert adams_on_cpu(several) == parts
    assert [adams_on_cpu(part) for part in parts] == [[part] for part in parts]


def test_other_optimizers_are_not_corrected() -> None:
    assert adams_on_cpu(torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])) == []
