"""Faults of PyTorch's, and of Python's that it makes matter."""

import inspect

import torch
from allennlp.common.testing import requires_gpu
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from tests.upstream.unpatched import worked_around_by


@worked_around_by("files.add_path_to_errors")
def test_saving_does_not_say_that_the_disk_is_full() -> bool:
    try:
        torch.save(torch.ones(1), "/dev/full")
    except RuntimeError:
        return True
    except OSError:
        return False
    raise AssertionError("Saving to a full disk has succeeded.")


@worked_around_by("meta_model._on_meta_device")
def test_a_float_tensor_is_on_the_cpu_whatever_the_default_device_is() -> bool:
    with torch.device("meta"):
        return torch.FloatTensor(1, 1).device.type == "cpu"


@requires_gpu
@worked_around_by("engine.process.random_states.repeatable_random_states")
def test_dropout_between_layers_is_another_after_the_random_state_is_set() -> bool:
    lstm = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5).cuda()
    inputs = torch.ones(4, 4, 8, device="cuda")
    lstm(inputs)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    outputs, _ = lstm(inputs)
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    outputs_again, _ = lstm(inputs)
    return not torch.equal(outputs, outputs_again)


@worked_around_by("launch.agent._limit_shutdown_time")
def test_workers_of_elastic_get_30_seconds_when_one_has_failed() -> bool:
    return "self._pc.join(-1)" in inspect.getsource(MultiprocessContext._poll)
