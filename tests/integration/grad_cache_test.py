"""
The activations of a chunk are all that is there at a time, however large the batch, and both passes
of a chunk see the same.
"""

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional
from unittest import mock

import pytest
import torch
from allennlp.common import Params
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine.parameters import free_memory
from allennlp_deepspeed.models.contrastive import ContrastiveModel
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Side, error_of_training
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


class Siamese(ContrastiveModel):
    """Prepares the ids of texts before it encodes them, and the offsets for its loss."""

    def __init__(self, prepare: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__(Vocabulary())
        self.embedding = torch.nn.EmbeddingBag(9, 4)
        self.register_buffer("mean", torch.tensor(0.0))
        self.num_texts = 0
        self.generator = torch.Generator().manual_seed(1)
        self._prepare = prepare

    def encode(self, first: Any, second: Any, offset: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        offset *= 2
        return {
            name: torch.tanh(self.embedding(self._prepare(self, text)))
            for name, text in (("first", first), ("second", second))
        }

    def contrastive_loss(  # type: ignore[override]
        self, representations: Dict[str, torch.Tensor], offset: torch.Tensor
    ) -> Dict[str, torch.Tensor]:
        similarities = representations["first"] @ representations["second"].T + offset
        targets = torch.arange(len(offset))
        return {"loss": torch.nn.functional.cross_entropy(similarities, targets)}


def add_in_place(model: Siamese, text: Any) -> torch.Tensor:
    text["ids"] += 1
    return text["ids"]


def add_to_a_view(model: Siamese, text: Any) -> torch.Tensor:
    text["ids"][:, 1:].add_(1)
    return text["ids"]


def take_out(model: Siamese, text: Any) -> torch.Tensor:
    return text.pop("ids") + 1


def batches_of(rank: int) -> List[Batch]:
    """In chunks of 2 rank 0 has 3 of them, and rank 1 has 2 and a dummy chunk."""
    generator = torch.Generator().manual_seed(rank)
    size = 5 - 2 * rank

    def text() -> Dict[str, torch.Tensor]:
        return {"ids": torch.randint(6, (size, 4), generator=generator)}

    return [
        {"first": text(), "second": text(), "offset": torch.rand(size, generator=generator)}
        for _ in range(3)
    ]


def siamese(prepare: Callable[[Any, Any], torch.Tensor], stage: Optional[int], **grad_cache: Any):
    arguments = {"grad_cache": grad_cache} if grad_cache else {}
    model = partial(Siamese, prepare)
    return Side(model, batches_of, stage, world_size=2, num_epochs=1, **arguments)


@pytest.mark.parametrize("chunk_size", [2, "auto"])
@pytest.mark.parametrize("prepare", [add_in_place, add_to_a_view, take_out])
def test_an_encoder_may_change_its_inputs(prepare: Any, chunk_size: Any):
    trained = siamese(prepare, stage=2, chunk_size=chunk_size).train()
    assert_same_weights(trained, siamese(prepare, stage=None).train())


def count(model: Siamese, text: Any) -> torch.Tensor:
    model.num_texts += len(text["ids"])
    return text["ids"]


def average(model: Siamese, text: Any) -> torch.Tensor:
    model.mean.lerp_(text["ids"].float().mean(), 0.01)
    return text["ids"]


def draw(model: Siamese, text: Any) -> torch.Tensor:
    return torch.randint(9, text["ids"].shape, generator=model.generator)


_NUMBERS = itertools.count()


def count_elsewhere(model: Siamese, text: Any) -> torch.Tensor:
    return (text["ids"] + next(_NUMBERS)) % 9


@pytest.mark.parametrize(
    "prepare, named",
    [(count, "num_texts"), (average, "mean"), (draw, "generator"), (count_elsewhere, "'first'")],
)
def test_an_encoder_that_would_do_otherwise_a_second_time_is_refused(prepare: Any, named: str):
    for message in siamese(prepare, 2, chunk_size=2).on_all_ranks(error_of_training):
        assert "trainer.grad_cache" in message and named in message


def test_the_search_for_a_chunk_size_leaves_no_trace():
    """Where all examples fit, each is encoded once."""

    def count_after(trainer: Any) -> Any:
        trainer.train()
        return trainer.model.num_texts

    counts = siamese(count, 2, chunk_size="auto").on_all_ranks(count_after)
    assert counts == [3 * 2 * size for size in (5, 3)]


def test_a_chunk_leaves_room_for_what_the_optimizer_is_to_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    texts = {"tokens": {"tokens": torch.ones(16, NUM_TOKENS, dtype=torch.long)}}
    batches = [{"query": texts, "document": texts}]
    more = {"num_epochs": 1, "grad_cache": {"chunk_size": "auto"}}
    side = Side(bi_encoder, lambda rank: batches, 2, **more)
    trainer: Any = side.construct(0, tmp_path)
    num_elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    free = 10**8
    with mock.patch.object(free_memory, "min_free_bytes", lambda device: free):
        trainer.train()
    (left,) = re.findall(r"is still to allocate, (\d+) bytes are free", caplog.text)
    # Two gradients, and two numbers for each element, in fp32. A shard may be padded.
    assert int(left) == pytest.approx(free - 4 * 4 * num_elements, abs=64)


class OwnLoss(DeepSpeedTrainer):
    def batch_outputs(self, batch: Any, for_training: bool) -> Dict[str, torch.Tensor]:
        outputs = super().batch_outputs(batch, for_training)
        return {**outputs, "loss": 2 * outputs["loss"]}


def test_a_trainer_with_a_loss_of_its_own_is_refused() -> None:
    texts = {"tokens": {"tokens": torch.ones(4, 2, dtype=torch.long)}}
    side = Side(
        bi_encoder,
        lambda rank: [{"query": texts, "document": texts}],
        2,
        trainer_class=OwnLoss,
        grad_cache={"chunk_size": 2},
    )
    assert "OwnLoss overrides 'batch_outputs'" in side.refusal()
