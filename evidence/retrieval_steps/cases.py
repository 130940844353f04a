"""Trainings of bi-encoders that are compared with those of sentence-transformers."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

NUM_STEPS, BATCH_SIZE = 6, 4

MNRL, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
GIST, CACHED_GIST = "GISTEmbedLoss", "CachedGISTEmbedLoss"

DISTINCT, OWN_DOCUMENT = "", "false hard negatives"
SAME_DOCUMENT, SAME_QUERY = "equal documents", "equal queries"
SAME_BOTH = "equal queries and documents"
"""
Data: texts of which none is another pair's; hard negatives that are the document of their own pair;
two queries with the same document; two documents of the same query; and both in one batch.
"""


class Case(NamedTuple):
    """
    A training.

    # Parameters

    loss : `str`
        The loss of sentence-transformers.
    pooling : `str`, optional (default = `"mean"`)
        Or `"cls"` or `"lasttoken"`.
    normalize : `bool`, optional (default = `True`)
    num_negatives : `int`, optional (default = `0`)
        Hard negatives of each pair.
    data : `str`, optional (default = `DISTINCT`)
    dropout : `float`, optional (default = `0.0`)
    bidirectional : `bool`, optional (default = `False`)
    matryoshka_dims : `List[int]`, optional (default = `None`)
    prompts : `Dict[str, str]`, optional (default = `None`)
    accumulation : `int`, optional (default = `1`)
    stage : `int`, optional (default = `0`)
    world_size : `int`, optional (default = `1`)
        The number of workers, of both.
    gathers : `bool`, optional (default = `True`)
        Whether workers take negatives from one another.
    footnote : `str`, optional (default = `""`)
        Why the losses differ.
    """

    loss: str
    pooling: str = "mean"
    normalize: bool = True
    num_negatives: int = 0
    data: str = DISTINCT
    dropout: float = 0.0
    bidirectional: bool = False
    matryoshka_dims: Optional[List[int]] = None
    prompts: Optional[Dict[str, str]] = None
    accumulation: int = 1
    stage: int = 0
    world_size: int = 1
    gathers: bool = True
    footnote: str = ""

    @property
    def chunk_size(self) -> Optional[int]:
        """The number of texts of a chunk with gradient caching."""
        return 2 if self.loss.startswith("Cached") else None

    @property
    def temperature(self) -> float:
        return 0.05 if self.normalize else 5.0

    @property
    def options(self) -> str:
        workers = "gathered" if self.gathers else "local"
        options = {
            "one hard negative": self.num_negatives == 1,
            f"{self.num_negatives} hard negatives": self.num_negatives > 1,
            self.data: self.data,
            "both directions": self.bidirectional,
            f"Matryoshka {self.matryoshka_dims}": self.matryoshka_dims,
            "prompts": self.prompts,
            f"dropout {self.dropout}": self.dropout,
            f"{workers} negatives": self.world_size > 1,
        }
        return ", ".join(name for name, is_set in options.items() if is_set)

    def records(self) -> List[Dict[str, Any]]:
        """
        Returns pairs, one after the other. A query has two words that its document has, too. Texts
        have different lengths, unless there is dropout: its random numbers depend on the padding.
        """
        made = []
        for i in range(NUM_STEPS * BATCH_SIZE * self.accumulation * self.world_size):
            number = 0 if self.dropout else i % 3
            query = f"name{i % 12} noun{i * 5 % 12}"
            document = f"{query} {' '.join(f'rest{(i + j) % 12}' for j in range(number))}".strip()
            negatives = [
                f"name{(i + 5 + j) % 12} verb{(i + j) % 12}" for j in range(self.num_negatives)
            ]
            if self.data == OWN_DOCUMENT and i % 2:
                negatives[0] = document
            if self.data == SAME_DOCUMENT and i % 2:
                document = made[-1]["document"]
                query = " ".join(reversed(made[-1]["query"].split()))
            if self.data == SAME_QUERY and i % 2 or self.data == SAME_BOTH and i % 4 == 1:
                query = made[-1]["query"]
                document = f"{made[-1]['document']} verb{i % 12}"
            if self.data == SAME_BOTH and i % 4 == 2:
                document = made[-2]["document"]
            made.append({"query": query, "document": document, "negatives": negatives})
        return made


_LEFT_OUT = (
    "`GISTEmbedLoss` leaves other positives of a query out of its softmax. Here they are in it, as "
    "positives (L_out of Khosla et al., 2020)."
)
_AVERAGED = (
    "If a query has two documents in the batch, of which one has another query, each pair is a "
    "positive by itself in `MultipleNegativesRankingLoss`. Here the loss of a query is the average "
    "over all of its documents. With equal queries or equal documents alone both sums are equal."
)

CASES: Tuple[Case, ...] = (
    Case(MNRL),
    Case(MNRL, "cls", stage=2, world_size=2),
    Case(MNRL, "lasttoken", stage=3, world_size=2),
    Case(MNRL, normalize=False, stage=2),
    Case(MNRL, "cls", normalize=False, num_negatives=2, stage=3, world_size=2),
    Case(MNRL, "lasttoken", normalize=False, num_negatives=1, world_size=2),
    Case(MNRL, num_negatives=1, stage=3),
    Case(MNRL, num_negatives=2, stage=2, world_size=2),
    Case(MNRL, num_negatives=2, accumulation=2, stage=2, world_size=2),
    Case(MNRL, bidirectional=True, num_negatives=1, stage=2, world_size=2),
    Case(MNRL, matryoshka_dims=[32, 16, 8], stage=3, world_size=2),
    Case(MNRL, prompts={"query": "verb5 ", "document": "noun7 noun8 "}, stage=2),
    Case(MNRL, gathers=False, num_negatives=1, stage=2, world_size=2),
    Case(CACHED, stage=2),
    Case(CACHED, "cls", num_negatives=1, stage=3, world_size=2),
    Case(CACHED, "lasttoken", num_negatives=2, stage=2, world_size=2),
    Case(CACHED, normalize=False, accumulation=3, world_size=2),
    Case(CACHED, bidirectional=True, stage=3, world_size=2),
    Case(CACHED, gathers=False, stage=2, world_size=2),
    Case(CACHED, dropout=0.1),
    Case(CACHED, "cls", dropout=0.1, num_negatives=1, stage=2, world_size=2),
    Case(CACHED, "lasttoken", dropout=0.1, stage=3, world_size=2),
    Case(GIST, num_negatives=1, data=OWN_DOCUMENT),
    Case(GIST, "cls", num_negatives=1, data=OWN_DOCUMENT, stage=2, world_size=2),
    Case(CACHED_GIST, num_negatives=1, data=OWN_DOCUMENT, stage=3, world_size=2),
    Case(MNRL, data=SAME_DOCUMENT, stage=2, world_size=2),
    Case(MNRL, data=SAME_QUERY, stage=3, world_size=2),
    Case(MNRL, data=SAME_BOTH, stage=2, world_size=2, footnote=_AVERAGED),
    Case(GIST, data=SAME_DOCUMENT, stage=2, world_size=2, footnote=_LEFT_OUT),
    Case(GIST, data=SAME_QUERY, stage=3, world_size=2, footnote=_LEFT_OUT),
)
