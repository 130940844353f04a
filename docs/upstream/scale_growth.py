"""The step after which the fp16 loss scale grows is half as long as the others."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
# Whatever this CPU is.
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

for stage in (2, 3):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weights, scales = [], []
    for _ in range(4):
        weights.append(deepspeed.utils.safe_get_full_fp32_param(model.weight).item())
        scales.append(engine.optimizer.loss_scale)
        engine.backward(engine(torch.ones(1, 1, dtype=torch.float16)).sum())
        engine.step()
    assert scales[-1] > scales[0]
    lengths = [round(before - after, 3) for before, after in zip(weights, weights[1:])]
    norm = float(engine.get_global_grad_norm())
    if lengths != [1, 1, 1] or norm != 1:
        sys.exit(f"fault: at stage {stage} steps of 1 are {lengths} long, their norm {norm}")
