"""ZeRO's Adagrad ignores a learning rate that is set after `initialize`, as schedulers do."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes

for stage in (2, 3):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.param_groups[0]["lr"] = 0.5
    before = deepspeed.utils.safe_get_full_fp32_param(model.weight).item()
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    change = before - deepspeed.utils.safe_get_full_fp32_param(model.weight).item()
    if round(change, 3) != 0.5:  # Adagrad's first step is as long as its learning rate
        sys.exit(f"fault: at stage {stage} a step with learning rate 0.5 is {change:.3f} long")
