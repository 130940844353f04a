"""
DeepSpeed's optimizers under AllenNLP names, with `parameter_groups`.
"""

from allennlp_deepspeed.optimizers.adagrad import CPUAdagradOptimizer
from allennlp_deepspeed.optimizers.adam import (
    CPUAdamOptimizer,
    CPUAdamWOptimizer,
    FusedAdamOptimizer,
    FusedAdamWOptimizer,
)
from allennlp_deepspeed.optimizers.check import check_optimizer, registered_class
from allennlp_deepspeed.optimizers.elementwise import (
    check_elementwise,
    check_section,
    warn_if_unknown,
)
from allennlp_deepspeed.optimizers.lamb import FusedLambOptimizer
from allennlp_deepspeed.optimizers.lion import (
    CPULionOptimizer,
    FusedLionOptimizer,
    LionOptimizer,
)
from allennlp_deepspeed.optimizers.loaded_states import adapt_loaded_states
from allennlp_deepspeed.optimizers.muon import MuonOptimizer
from allennlp_deepspeed.optimizers.offload import for_offload, standing_in

__all__ = [
    "CPUAdagradOptimizer",
    "CPUAdamOptimizer",
    "CPUAdamWOptimizer",
    "CPULionOptimizer",
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
