"""
Imports what DeepSpeed imports when an engine is brought up, so that processes that are forked from
this one don't, each for itself.

It brings PyTorch's compiler with it, which takes longer than anything else that most workers do.
"""

import deepspeed.comm.mori  # noqa: F401
import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch._subclasses.schema_check_mode  # noqa: F401
import torch.utils.serialization.config  # noqa: F401
