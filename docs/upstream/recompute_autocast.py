"""Activation checkpointing recomputes in fp32 what was computed under autocast."""

import sys

import deepspeed
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
deepspeed.init_distributed(dist_backend="gloo")
deepspeed.checkpointing.configure(None)
layer = torch.nn.Linear(1, 1)
device = deepspeed.accelerator.get_accelerator().device_name()

for checkpoint in (
    deepspeed.checkpointing.checkpoint,
    deepspeed.checkpointing.non_reentrant_checkpoint,
):
    dtypes = []

    def forward(x, dtypes=dtypes):
        output = layer(x)
        dtypes.append(output.dtype)
        return output

    layer.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        output = checkpoint(forward, torch.ones(1, 1, device=device, requires_grad=True))
    try:
        output.sum().backward()
    except RuntimeError as error:
        dtypes.append(str(error))
    if dtypes != [torch.bfloat16, torch.bfloat16]:
        sys.exit(f"fault: {checkpoint.__name__} computed in {dtypes}")
