"""What a PyTorch has to have for its collectives to be counted."""

import pytest
import torch.distributed as dist

needs_counting = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="the process groups of this PyTorch have no hooks",
)
