"""Parameters that have no dimensions, or are transposed, can be neither broadcast nor clipped."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes


class Model(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


errors = []
for weight in (torch.tensor(1.0), torch.arange(6.0).reshape(2, 3).t()):
    model = Model(weight.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {"train_micro_batch_size_per_gpu": 1}
    try:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert torch.equal(model.weight, weight)
        model.weight.grad = torch.full_like(weight, 2.0)
        clip_grad_norm_([model.weight], max_norm=1.0)
        assert round(float(model.weight.grad.norm()), 3) == 1
    except RuntimeError as error:
        errors.append(str(error).splitlines()[0])
if errors:
    sys.exit(f"fault: {'; '.join(errors)}")
