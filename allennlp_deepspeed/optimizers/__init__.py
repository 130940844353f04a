"""
DeepSpeed's optimizers under AllenNLP names, with `parameter_groups`.
"""

from allennlp_deepspeed.optimizers.check import check_optimizer
from allennlp_deepspeed.optimizers.deepspeed_optimizers import (
    CPUAdagradOptimizer,
    CPUAdamOptimizer,
    CPUAdamWOptimizer,
    CPULionOptimizer,
    DeepSpeedOptimizer,
    FusedAdamOptimizer,
    FusedAdamWOptimizer,
    FusedLambOptimizer,
    FusedLionOptimizer,
    LionOptimizer,
    MuonOptimizer,
)
from allennlp_deepspeed.optimizers.elementwise import (
    check_elementwise,
    check_section,
    warn_if_unknown,
)
from allennlp_deepspeed.optimizers.offload import (
    adapt_loaded_states,
    for_offload,
    registered_class,
    standing_in,
)

__all__ = [
    "CPUAdagradOptimizer",
    "CPUAdamOptimizer",
    "CPUAdamWOptimizer",
    "CPULionOptimizer",
    "DeepSpeedOptimizer",
    "FusedAdamOptimizer",
    "FusedAdamWOptimizer",
    "FusedLambOptimizer",
    "FusedLionOptimizer",
    "LionOptimizer",
    "MuonOptimizer",
    "adapt_loaded_states",
    "check_elementwise",
    "check_optimizer",
    "check_section",
    "for_offload",
    "registered_class",
    "standing_in",
    "warn_if_unknown",
]
