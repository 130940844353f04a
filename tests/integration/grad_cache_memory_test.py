"""The activations of a chunk are all that is there at a time, however large the batch."""

from pathlib import Path
from typing import Any, Dict, Optional

import torch
from allennlp.common import Params
from allennlp.data import Vocabulary
from allennlp.models import Model

from tests.support.side_by_side import Side
from tests.support.tensor_memory import TensorMemory

CHUNK_SIZE = 32
NUM_TOKENS = 64
DIM = 512


def bi_encoder() -> Model:
    embedder = {"type": "embedding", "embedding_dim": DIM, "num_embeddings": 3}
    return Model.from_params(
        Params(
            {
                "type": "bi_encoder",
                "text_field_embedder": {"token_embedders": {"tokens": embedder}},
                "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": DIM},
                "projection_dim": 16,
                "dropout": 0.1,
            }
        ),
        vocab=Vocabulary(),
    )


def peak(batch_size: int, directory: Path, grad_cache: Optional[Dict[str, Any]]) -> int:
    """The bytes of tensors in one optimizer step, at their peak, but for the batch."""
    texts = {"tokens": {"tokens": torch.ones(batch_size, NUM_TOKENS, dtype=torch.long)}}
    side = Side(
        bi_encoder,
        lambda rank: [{"query": texts, "document": texts}],
        stage=2,
        zero={"reduce_bucket_size": 10**5},  # whose default is 2 GB
        num_epochs=1,
        grad_cache=grad_cache,
    )
    trainer = side.construct(0, directory)
    with TensorMemory() as memory:
        trainer.train()
    return memory.peak


def test_peak_memory_is_that_of_a_chunk(tmp_path: Path):
    def activations(batch_size: int) -> int:
        # Of 16 numbers and two ids, with gradients, and their copies on the way.
        representations = 2 * batch_size * (16 * 4) * 4
        grad_cache = {"chunk_size": CHUNK_SIZE}
        return peak(batch_size, tmp_path / str(batch_size), grad_cache) - representations

    small, large = activations(256), activations(1024)
    assert small > 2 * CHUNK_SIZE * NUM_TOKENS * DIM * 4  # the embedded tokens of both sides
    # A vector that were kept for each pair would be four times as much.
    assert abs(large - small) < (1024 - 256) * DIM
    assert peak(256, tmp_path / "uncached", None) > 4 * small
