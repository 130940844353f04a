"""The activations of a chunk are all that is there at a time, however large the batch."""

from pathlib import Path
from typing import Any, Dict, Optional

import torch
from allennlp.common import Params
from allennlp.data import Instance, Token, Vocabulary
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.data.fields import TextField
from allennlp.data.token_indexers import SingleIdTokenIndexer
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedTrainer
from tests.support.tensor_memory import TensorMemory

CHUNK_SIZE = 32
NUM_TOKENS = 64
DIM = 512


def peak(batch_size: int, directory: Path, grad_cache: Optional[Dict[str, Any]]) -> int:
    """The bytes of tensors in one optimizer step, at their peak."""
    field = TextField([Token("word")] * NUM_TOKENS, {"tokens": SingleIdTokenIndexer()})
    instance = Instance({"query": field, "document": field})
    vocab = Vocabulary.from_instances([instance])
    instance.index_fields(vocab)
    embedder = {"token_embedders": {"tokens": {"type": "embedding", "embedding_dim": DIM}}}
    model = Model.from_params(
        Params(
            {
                "type": "bi_encoder",
                "text_field_embedder": embedder,
                "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": DIM},
                "projection_dim": 16,
                "dropout": 0.1,
            }
        ),
        vocab=vocab,
    )
    trainer = DeepSpeedTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        SimpleDataLoader([instance] * batch_size, batch_size),
        num_epochs=1,
        cuda_device=-1,
        serialization_dir=directory,
        enable_default_callbacks=False,
        run_confidence_checks=False,
        grad_cache=grad_cache,
        # Its default is 2 GB.
        deepspeed_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**5}},
    )
    with TensorMemory() as memory:
        trainer.train()
    return memory.peak


def test_peak_memory_is_that_of_a_chunk(tmp_path: Path):
    def activations(batch_size: int) -> int:
        inputs = 2 * batch_size * NUM_TOKENS * 8
        # Of 16 numbers and two ids, with gradients, and their copies on the way.
        representations = 2 * batch_size * (16 * 4) * 4
        grad_cache = {"chunk_size": CHUNK_SIZE}
        return peak(batch_size, tmp_path / str(batch_size), grad_cache) - inputs - representations

    small, large = activations(256), activations(1024)
    assert small > 2 * CHUNK_SIZE * NUM_TOKENS * DIM * 4  # the embedded tokens of both sides
    # A vector that were kept for each pair would be four times as much.
    assert abs(large - small) < (1024 - 256) * DIM
    assert peak(256, tmp_path / "uncached", None) > 4 * small
