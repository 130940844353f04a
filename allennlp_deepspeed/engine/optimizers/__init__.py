"""Optimizers: DeepSpeed's, which one updates the weights, and whether it can update shards."""

from allennlp_deepspeed.engine.optimizers.deepspeed_optimizers import (
    CPUAdamOptimizer,
    CPUAdamWOptimizer,
    FusedAdamOptimizer,
    FusedAdamWOptimizer,
    LionOptimizer,
    MuonOptimizer,
)

__all__ = [
    "CPUAdamOptimizer",
    "CPUAdamWOptimizer",
    "FusedAdamOptimizer",
    "FusedAdamWOptimizer",
    "LionOptimizer",
    "MuonOptimizer",
]
