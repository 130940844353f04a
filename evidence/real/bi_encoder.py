"""
MiniLM, fine-tuned with large batches to find a verse in another translation.
"""

import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List

from evidence.real import data
from evidence.real.classifier import minilm
from evidence.real.recorder import Cell

_TEMPERATURE = 0.05


def prepare(cell: Cell, tiny: bool) -> None:
    from transformers import AutoModel, AutoTokenizer

    if tiny:
        from tests.fixtures.tiny_lm import WORDS

        pairs = [{"query": word, "document": f"{word} {word[:4]}1"} for word in WORDS]
    else:
        from demo.prepare_verses import read_pairs

        # Verses that are there twice are no negatives of each other for ours, and are for others.
        by_query = {pair["query"]: pair for _, pair in read_pairs()}
        pairs = list({pair["document"]: pair for pair in by_query.values()}.values())
    data.write(cell, pairs)
    if Path(f"{cell.data}/model").exists():
        return
    pretrained = minilm(cell, tiny)
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModel.from_pretrained(pretrained, **without_dropout)
    model.save_pretrained(f"{cell.data}/model")
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(f"{cell.data}/model")


def config(cell: Cell) -> Dict[str, Any]:
    model = f"{cell.data}/model"
    width = json.loads(Path(model, "config.json").read_text())["hidden_size"]
    transformer = {"type": "pretrained_transformer", "model_name": model}
    return {
        "dataset_reader": {
            "type": "text_pairs",
            "tokenizer": {**transformer, "max_length": cell.max_length},
            "token_indexers": {"tokens": transformer},
        },
        "vocabulary": {"type": "empty"},
        "model": {
            "type": "bi_encoder",
            "text_field_embedder": {"token_embedders": {"tokens": transformer}},
            "seq2vec_encoder": {
                "type": "bag_of_embeddings",
                "embedding_dim": width,
                "averaged": True,
            },
            "temperature": _TEMPERATURE,
        },
    }


def _in_order(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Iterable[List[int]]:
    from torch.utils.data import BatchSampler, SequentialSampler

    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def sentence_transformers(cell: Cell) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses, modules

    from evidence.real import transformers_steps

    arguments = transformers_steps.arguments(cell, with_deepspeed=False)
    transformer = modules.Transformer(f"{cell.data}/model", max_seq_length=cell.max_length)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling, modules.Normalize()])
    pairs = [{key: pair[key] for key in ("query", "document")} for pair in data.by_batch(cell)]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments),
        train_dataset=Dataset.from_list(pairs),
        loss=losses.CachedMultipleNegativesRankingLoss(
            model,
            scale=1 / _TEMPERATURE,
            mini_batch_size=cell.chunk_size,
            gather_across_devices=cell.world_size > 1,
        ),
    )
    trainer.args.batch_sampler = _in_order
    transformers_steps.train(trainer)


if __name__ == "__main__":
    {"sentence-transformers": sentence_transformers}[sys.argv[1]](Cell.read())
