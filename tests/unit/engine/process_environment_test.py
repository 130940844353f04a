"""What DeepSpeed needs of a process."""

from datetime import timedelta
from unittest import mock

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

from allennlp_deepspeed.engine.process_environment import process_environment

CPU = torch.device("cpu")
PROCESSOR = {"arch": "X86_64", "flags": ["avx2"]}


def test_the_processor_is_looked_at_once() -> None:
    builder = CPUAdamBuilder()
    with mock.patch("cpuinfo.get_cpu_info", return_value=PROCESSOR) as look:
        with process_environment(CPU, local_rank=0):
            flags = [builder.cpu_arch(), builder.simd_width(), builder.simd_width()]
        assert look.call_count == 1
        builder.cpu_arch()
        assert look.call_count == 2  # as it was
    assert flags == ["-march=native", "-D__AVX256__", "-D__AVX256__"]


def test_no_operator_for_inference_is_loaded_or_looked_for() -> None:
    looked_for = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(deepspeed.ops, "_probe_compatible_ops", looked_for):
        with process_environment(CPU, local_rank=0):
            backend = TorchBackend("gloo", timeout=timedelta(minutes=1), init_method=None)
        assert backend.shm_comm_op is None
