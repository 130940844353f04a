"""
What is compared: each way to train, by the name under which it is reported, and what they train.
"""

from typing import Dict

from evidence.contenders.accelerate import Accelerate
from evidence.contenders.allennlp import GradientDescent
from evidence.contenders.bare import Bare
from evidence.contenders.distributed_data_parallel import DdpCached, DdpUncached
from evidence.contenders.fully_shard import FullyShard
from evidence.contenders.lightning import Lightning
from evidence.contenders.ours import (
    Ours,
    OursApart,
    OursCached,
    OursFlush,
    OursMicroBatch,
)
from evidence.contenders.sentence_transformers import SentenceTransformers
from evidence.harness.contender import Contender

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
}

# Those that train a decoder in bf16.
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
