"""Stage 3 gathers parameters in a stream that doesn't wait for the optimizer step."""

import contextlib
import os
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes


class Stream:
    """A stream's name, and the last optimizer step that it has waited for."""

    def __init__(self):
        self.step = 0

    def wait_stream(self, stream):
        self.step = max(self.step, stream.step)

    def synchronize(self):
        pass


class Event:
    def record(self, stream=None):
        pass

    def query(self):
        return True


class AcceleratorWithStreams(CPU_Accelerator):
    Stream, Event = Stream, Event
    default = current = Stream()

    def is_synchronized_device(self):
        return False

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device_index=None):
        return self.current

    def default_stream(self, device_index=None):
        return self.default


def train(rank, store, errors):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    accelerator = AcceleratorWithStreams()
    deepspeed.accelerator.set_accelerator(accelerator)
    torch.Tensor.record_stream = lambda tensor, stream: None
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        # It synchronizes the host with the device in each step, which hides the fault.
        "timers": {"throughput": {"enabled": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    all_gather, error = dist.all_gather_into_tensor, None

    def gather(*args, **kwargs):
        nonlocal error
        if accelerator.current.step < accelerator.default.step:
            error = error or f"after step {accelerator.default.step} it doesn't wait"
        return all_gather(*args, **kwargs)

    dist.all_gather_into_tensor = deepspeed.comm.comm.cdb.all_gather_function = gather
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        accelerator.default.step += 1
    errors.put(error)


if __name__ == "__main__":
    errors = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        args = (f"{directory}/store", errors)
        mp.start_processes(train, args, nprocs=2, start_method="fork")
    found = [error for error in (errors.get(), errors.get()) if error]
    if found:
        sys.exit(f"fault: {'; '.join(found)}")
