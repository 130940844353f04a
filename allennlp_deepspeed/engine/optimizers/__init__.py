"""Registered optimizers, and whether an optimizer can update shards."""

from allennlp_deepspeed.engine.optimizers.fused import FusedAdamOptimizer, FusedAdamWOptimizer
from allennlp_deepspeed.engine.optimizers.lion import LionOptimizer
from allennlp_deepspeed.engine.optimizers.muon import MuonOptimizer

__all__ = ["FusedAdamOptimizer", "FusedAdamWOptimizer", "LionOptimizer", "MuonOptimizer"]
