from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, Tuple

import torch
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, Vocabulary
from allennlp.data.data_loaders import TensorDict
from allennlp.models.model import Model
from transformers import BertConfig, BertModel, BertTokenizer
from typing_extensions import override

from evidence.harness.process_tree import Worker
from evidence.harness.workload import SEED, Workload

TEMPERATURE = 0.05

_WIDTH = 256
_NUM_LAYERS = 4
_NUM_WORDS = 2000
# Repeated as often as needed, so that there is something to be learned.
_NUM_DISTINCT_BATCHES = 8

# It has parameters, and means nothing to a bi-encoder.
WITHOUT_POOLER = {"add_pooling_layer": False}


@dataclass(frozen=True)
class TextPairs(Workload):
    """
    A bi-encoder, whose transformer and tokenizer are in `directory`, as `transformers` reads them,
    and random texts.

    # Parameters

    directory : `Path`
    stage : `int`
    batch_size : `int`
        Pairs on a rank.
    chunk_size : `int`
        Texts that are encoded in one call, by those that cache gradients. The graph of this package
        and of the plain loop is that of as many pairs.
    num_tokens : `int`
        In each text.
    """

    directory: Path
    stage: int
    batch_size: int
    chunk_size: int
    num_tokens: int

    accumulation = 1
    # Adam's steps would be the same with gradients that are too large or too small by a factor.
    optimizer = {"type": "sgd", "lr": 0.002}

    def __str__(self) -> str:
        return f"stage {self.stage}, texts of {self.num_tokens} tokens"

    @override
    def prepare(self, world_size: int) -> None:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        # AllenNLP tries a tokenizer out with the words "1" and "2".
        words = special + [str(i) for i in range(_NUM_WORDS - len(special))]
        vocabulary = self.directory / "vocab.txt"
        vocabulary.write_text("\n".join(words))
        BertTokenizer(str(vocabulary)).save_pretrained(self.directory)
        torch.manual_seed(SEED)
        config = BertConfig(
            vocab_size=_NUM_WORDS,
            hidden_size=_WIDTH,
            num_hidden_layers=_NUM_LAYERS,
            num_attention_heads=_WIDTH // 64,
            intermediate_size=4 * _WIDTH,
            max_position_embeddings=self.num_tokens,
            # The contenders' random states are not the same, and the losses have to be.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertModel(config, **WITHOUT_POOLER).save_pretrained(self.directory)

    @override
    def build_data_loader(self, worker: Worker) -> DataLoader:
        return Batches(self, worker)

    @override
    def build_model(self) -> Model:
        prepare_environment(Params({}))
        embedder = {
            "type": "pretrained_transformer",
            "model_name": str(self.directory),
            "transformer_kwargs": WITHOUT_POOLER,
        }
        mean = {"type": "bag_of_embeddings", "embedding_dim": _WIDTH, "averaged": True}
        return Model.from_params(
            Params(
                {
                    "type": "bi_encoder",
                    "text_field_embedder": {"token_embedders": {"tokens": embedder}},
                    "seq2vec_encoder": mean,
                    "temperature": TEMPERATURE,
                }
            ),
            vocab=Vocabulary(),
        )


class Batches(DataLoader):
    """
    One epoch of a rank's batches, which are on the device from the beginning: `"query"` and
    `"document"` with their ids, as they come from the "text_pairs" reader with the indexer
    "pretrained_transformer". A document has about half of its query's tokens, in their places.

    # Parameters

    workload : `TextPairs`
    worker : `Worker`
    """

    def __init__(self, workload: TextPairs, worker: Worker) -> None:
        self._num_batches = worker.plan.total
        generator = torch.Generator().manual_seed(SEED + worker.rank)
        self._distinct = [
            _batch(workload, generator, worker.device) for _ in range(_NUM_DISTINCT_BATCHES)
        ]

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[TensorDict]:
        for i in range(self._num_batches):
            yield self._distinct[i % _NUM_DISTINCT_BATCHES]

    def iter_instances(self) -> Iterator:
        return iter(())

    def index_with(self, vocab: Vocabulary) -> None:
        pass

    def set_target_device(self, device: torch.device) -> None:
        pass


def texts_of(batch: TensorDict) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
    """
    # Returns

    `Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]`
        The queries' and the documents' `"input_ids"` and `"attention_mask"`, each of shape
        (batch_size, num_tokens).
    """
    queries, documents = (
        {"input_ids": texts["token_ids"], "attention_mask": texts["mask"]}
        for texts in (batch["query"]["tokens"], batch["document"]["tokens"])
    )
    return queries, documents


def _batch(workload: TextPairs, generator: torch.Generator, device: torch.device) -> TensorDict:
    shape = (workload.batch_size, workload.num_tokens)
    queries, others = torch.randint(5, _NUM_WORDS, (2, *shape), generator=generator)
    documents = torch.where(torch.rand(shape, generator=generator) < 0.5, queries, others)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    query_ids, document_ids = torch.randint(2**62, (2, workload.batch_size), generator=generator)
    return {
        "query": _text_field(queries.to(device), mask),
        "query_id": query_ids.to(device),
        "document": _text_field(documents.to(device), mask),
        "document_id": document_ids.to(device),
    }


def _text_field(token_ids: torch.Tensor, mask: torch.Tensor) -> Dict[str, Dict[str, torch.Tensor]]:
    return {
        "tokens": {
            "token_ids": token_ids * mask,
            "mask": mask,
            "type_ids": torch.zeros_like(token_ids),
        }
    }
