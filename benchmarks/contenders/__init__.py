"""
What is compared: each way to train, by the name under which it is reported, and what they train.
"""

from typing import Dict

from benchmarks.contenders.accelerate import Accelerate
from benchmarks.contenders.allennlp import FairScale, GradientDescent
from benchmarks.contenders.bare import Bare, BareCoalesced
from benchmarks.contenders.distributed_data_parallel import Ddp, DdpCached, DdpUncached
from benchmarks.contenders.fully_shard import FullyShard, FullyShardKeeping
from benchmarks.contenders.lightning import Lightning
from benchmarks.contenders.ours import (
    Ours,
    OursApart,
    OursCached,
    OursFlush,
    OursMicroBatch,
    OursUntrimmed,
    OursWith,
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

# The same over a slow network, with PyTorch's own ways to train there.
SLOW_NETWORK_CONTENDERS: Dict[str, Contender] = {
    "ours": CONTENDERS["ours"],
    "ours-whole": OursWith((3,), shard_within=1),
    BARE: CONTENDERS[BARE],
    "bare-coalesced": BareCoalesced(),
    "accelerate": CONTENDERS["accelerate"],
    "fsdp2": FullyShard(),
    "fsdp2-keeping": FullyShardKeeping(),
    "ddp": Ddp(),
    "gradient-descent": CONTENDERS["gradient-descent"],
    # Of ours, each with something else than what it does by itself.
    "ours-backend": OursWith((1, 2, 3), reduce_within=None),
    "ours-overlap": OursWith((1, 2), {"overlap_comm": True}),
    "ours-no-overlap": OursWith((3,), {"overlap_comm": False}),
    "ours-small-buckets": OursWith(
        (1, 2, 3), {"overlap_comm": True, "reduce_bucket_size": 500_000}
    ),
    "ours-flush": CONTENDERS["ours-flush"],
}

# Those that train a bi-encoder.
BI_ENCODER_CONTENDERS: Dict[str, Contender] = {
    "ours-uncached": Ours(),
    "ours-cached": OursCached(),
    "ours-apart": OursApart(),
    "ours-untrimmed": OursUntrimmed(),
    "ddp-uncached": DdpUncached(),
    "ddp-cached": DdpCached(),
    "sentence-transformers": SentenceTransformers(),
}
