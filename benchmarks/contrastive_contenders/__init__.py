"""
Everything that `benchmarks.contrastive` measures, by the name under which it is reported.
"""

from typing import Dict

from benchmarks.contrastive_contenders.contender import ContrastiveContender
from benchmarks.contrastive_contenders.ours import Ours, OursCached
from benchmarks.contrastive_contenders.plain import Plain, PlainCached
from benchmarks.contrastive_contenders.sentence_transformers import SentenceTransformersCached

OURS, OURS_CACHED = "ours-uncached", "ours-cached"
PLAIN, PLAIN_CACHED = "ddp-uncached", "ddp-cached"
SENTENCE_TRANSFORMERS = "sentence-transformers"

CONTENDERS: Dict[str, ContrastiveContender] = {
    OURS: Ours(),
    OURS_CACHED: OursCached(),
    PLAIN: Plain(),
    PLAIN_CACHED: PlainCached(),
    SENTENCE_TRANSFORMERS: SentenceTransformersCached(),
}

# Which are timed in turn, and whose time is divided by whose.
PAIRS = (
    (OURS_CACHED, OURS),
    (OURS_CACHED, PLAIN_CACHED),
    (OURS_CACHED, SENTENCE_TRANSFORMERS),
    (PLAIN_CACHED, PLAIN),
)

__all__ = ["CONTENDERS", "PAIRS"]
