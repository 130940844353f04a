"""
Imports what DeepSpeed imports when an engine is brought up, and PyTorch with the first loss, so
that processes that are forked from this one don't, each for itself.

It brings PyTorch's compiler with it, which takes longer than anything else that most workers do.
"""

import contextlib

import deepspeed.comm.mori  # noqa: F401
import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: F401
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch._subclasses.schema_check_mode  # noqa: F401
import torch.utils.serialization.config  # noqa: F401

with contextlib.suppress(ImportError):  # it is new in PyTorch 2.14
    import torch.nn.modules.linear_cross_entropy  # noqa: F401
