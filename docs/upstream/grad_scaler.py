"""The `GradScaler` of `torch_autocast` to fp16 isn't saved, and its skipped steps are unnoticed."""

import os
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes


def new_engine():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def next_scale(engine):
    return engine.scale(torch.ones((), requires_grad=True) * 1).item()


engine = new_engine()
engine.backward(engine(torch.ones(1, 1)).sum() * float("inf"))
engine.step()
faults = ["was_step_applied() after a skipped step"] if engine.was_step_applied() else []
with tempfile.TemporaryDirectory() as directory:
    engine.save_checkpoint(directory)
    loaded = new_engine()
    loaded.load_checkpoint(directory)
scales = next_scale(engine), next_scale(loaded)
if scales[0] != scales[1]:
    faults.append("the loss scale {:g} is {:g} after it is loaded".format(*scales))
if faults:
    sys.exit(f"fault: {', '.join(faults)}")
