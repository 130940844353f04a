import copy

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from allennlp_deepspeed.engine.bias_correction import corrected_by_step_count

NUM_STEPS = 60


def weights_after_steps(is_interrupted: bool) -> torch.Tensor:
    """Of one parameter, by an optimizer or by two of which the second goes on with the states."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(500, generator=generator))
    optimizer = DeepSpeedCPUAdam([weight], lr=0.1)
    for step in range(NUM_STEPS):
        if step in (0, NUM_STEPS // 2) and (step == 0 or is_interrupted):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = DeepSpeedCPUAdam([weight], lr=0.1)
            optimizer.load_state_dict(state)
            undo = corrected_by_step_count(optimizer)
        weight.grad = torch.randn(500, generator=generator)
        optimizer.step()
    undo()
    assert not optimizer._optimizer_step_pre_hooks
    return weight.detach()


def test_steps_after_an_interruption_are_those_of_one_optimizer():
    """To the last bit. That DeepSpeed's Adam as it is rounds otherwise, tests/upstream shows."""
    expected = weights_after_steps(is_interrupted=False)
    assert torch.equal(weights_after_steps(is_interrupted=True), expected)
