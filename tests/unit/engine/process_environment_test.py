"""What DeepSpeed needs of a process."""

from datetime import timedelta
from unittest import mock

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend

from allennlp_deepspeed.engine.process.process_environment import process_environment

CPU = torch.device("cpu")


def test_no_operator_for_inference_is_loaded_or_looked_for() -> None:
    looked_for = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(deepspeed.ops, "_probe_compatible_ops", looked_for):
        with process_environment(CPU, local_rank=0):
            backend = TorchBackend("gloo", timeout=timedelta(minutes=1), init_method=None)
        assert backend.shm_comm_op is None
