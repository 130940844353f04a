"""A frozen parameter with two names is left out of a state dict under one of them only."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes

model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
model[1].weight = model[0].weight
model[0].weight.requires_grad_(False)
optimizer = torch.optim.SGD([model[2].weight], lr=1.0)
config = {"train_micro_batch_size_per_gpu": 1}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
names = list(engine.module_state_dict(exclude_frozen_parameters=True))
if names != ["2.weight"]:
    sys.exit(f"fault: only '2.weight' is trained, but the state dict has {names}")
