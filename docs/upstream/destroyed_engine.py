"""Forward passes of a model still call the hooks of a destroyed engine, and keep it in memory."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes

for stage in (0, 2, 3):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.destroy()
    left = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    if left:
        sys.exit(f"fault: at stage {stage} a destroyed engine has left {len(left)} hooks")
