"""A half-precision engine at stage 0 has made a step before the first one."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes

model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
deepspeed.initialize(model=model, optimizer=optimizer, config=config)

# Of optimizers that aren't fused, above, and of those that are, such as FusedAdam.
fused = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))])
FP16_Optimizer(fused, low_precision_dtype=torch.bfloat16)

steps = [int(state["step"]) for o in (optimizer, fused) for state in o.state.values()]
if any(steps):
    sys.exit(f"fault: new optimizers have made {steps} steps")
