from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from allennlp_deepspeed.engine.graph_capture import no_check_on_cpu


@pytest.mark.parametrize("device, looks", [("cpu", False), ("cuda", True)])
def test_only_on_the_cpu_a_step_does_not_look_for_gpus(device: str, looks: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.Adam([weight])
    engine: Any = SimpleNamespace(basic_optimizer=optimizer, device=torch.device(device))
    with mock.patch("torch.cuda.device_count", return_value=0) as device_count:
        with no_check_on_cpu(engine):
            optimizer.step()
        assert device_count.called is looks
        optimizer.step()  # as before, when the engine is gone
        assert device_count.called
