"""Two ranks set the full value of a parameter with three elements."""

import os
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes


def set_value(rank, store, errors):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    value = torch.tensor([[1.0, 2.0, 3.0]])
    try:
        deepspeed.utils.safe_set_full_fp32_param(model.weight, value)
        error = None
    except RuntimeError as raised:
        error = str(raised)
    if not torch.equal(deepspeed.utils.safe_get_full_fp32_param(model.weight), value):
        error = error or "another value"
    errors.put(error)


if __name__ == "__main__":
    errors = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        args = (f"{directory}/store", errors)
        mp.start_processes(set_value, args, nprocs=2, start_method="fork")
    found = [error for error in (errors.get(), errors.get()) if error]
    if found:
        sys.exit(f"fault: {'; '.join(found)}")
