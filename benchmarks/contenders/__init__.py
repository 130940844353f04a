"""
What is compared: each way to train, by the name under which it is reported, and what they train.
"""

from typing import Dict

from benchmarks.contenders.accelerate import Accelerate
from benchmarks.contenders.allennlp import FairScale, GradientDescent
from benchmarks.contenders.bare import Bare
from benchmarks.contenders.distributed_data_parallel import DdpCached, DdpUncached
from benchmarks.contenders.fully_shard import FullyShard
from benchmarks.contenders.lightning import Lightning
from benchmarks.contenders.ours import (
    Ours,
    OursApart,
    OursCached,
    OursFlush,
    OursMicroBatch,
)
from benchmarks.contenders.sentence_transformers import SentenceTransformers
from benchmarks.harness.contender import Contender

BARE = "bare"  # all others are compared with it

# Those that train any model.
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

# Those that train a decoder in bf16. AllenNLP has FairScale's FSDP in fp32 and fp16.
DECODER_CONTENDERS: Dict[str, Contender] = {
    BARE: Bare(),
    "ours": Ours(),
    "accelerate": Accelerate(),
    "fully_shard": FullyShard(),
    "lightning": Lightning(),
}

# Those that train a bi-encoder.
BI_ENCODER_CONTENDERS: Dict[str, Contender] = {
    "ours-uncached": Ours(),
    "ours-cached": OursCached(),
    "ours-apart": OursApart(),
    "ddp-uncached": DdpUncached(),
    "ddp-cached": DdpCached(),
    "sentence-transformers": SentenceTransformers(),
}
