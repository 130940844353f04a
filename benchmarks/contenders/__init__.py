"""
Everything that is measured, by the name under which it is reported.
"""

from typing import Dict

from benchmarks.contenders.accelerate import Accelerate
from benchmarks.contenders.allennlp import FairScale, GradientDescent
from benchmarks.contenders.bare import Bare
from benchmarks.contenders.contender import Contender, Job, Participant, Unavailable
from benchmarks.contenders.lightning import Lightning
from benchmarks.contenders.ours import Ours, OursFlush, OursMicroBatch

BARE = "bare"  # all others are compared with it

CONTENDERS: Dict[str, Contender] = {
    BARE: Bare(),
    "ours": Ours(),
    "ours-micro-batch": OursMicroBatch(),
    "ours-flush": OursFlush(),
    "accelerate": Accelerate(),
    "gradient-descent": GradientDescent(),
    "lightning": Lightning(),
    "fairscale": FairScale(),
}

__all__ = ["BARE", "CONTENDERS", "Contender", "Job", "Participant", "Unavailable"]
