"""With an optimizer that isn't fused, the reported gradient norm is that of scaled gradients."""

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

model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "loss_scale": 8}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
model.weight.grad = 8 * torch.full_like(model.weight, 3.0)  # of a scaled loss
engine.optimizer.step()
norm = float(engine.optimizer._global_grad_norm)
if norm != 3:
    sys.exit(f"fault: the norm 3 is reported as {norm}")
