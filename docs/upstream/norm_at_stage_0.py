"""An fp32 engine at stage 0 clips gradients by a norm that it doesn't report."""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes

model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.full((1, 1), 3.0)).sum())
engine.step()
norm = engine.get_global_grad_norm()
if norm is None or round(float(norm), 3) != 3:
    sys.exit(f"fault: the norm 3 is reported as {norm}")
