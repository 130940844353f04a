"""Trains a bi-encoder with sentence-transformers, and with this package."""

from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Tuple

import numpy as np
import torch
from allennlp.common import Params
from allennlp.data import Batch, DatasetReader, Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import AutoTokenizer, BertConfig, BertModel, PrinterCallback
from transformers import TrainerCallback as TransformersCallback
from typing_extensions import override

from evidence.harness import steps_beside
from evidence.harness.steps_beside import StepLosses, Trained, Weights, read_step_losses
from evidence.retrieval_steps.cases import BATCH_SIZE, GIST, NUM_STEPS, Case
from tests.support.side_by_side import Side, trained
from tests.support.workers import run_workers

LEARNING_RATE = 0.03

_WITHOUT_POOLER = {"add_pooling_layer": False}

# Texts as similar to a query as its document are false negatives.
_GIST_MARGIN = 0.01


def train_with_sentence_transformers(
    case: Case, model: str, directory: Path
) -> Tuple[Weights, Trained]:
    """Returns the weights before the training, and what it has trained, in forked workers."""
    guide = directory / "guide"
    _write_guide(model, guide)
    return run_workers(
        case.world_size, lambda rank: _train(case, model, guide, directory / "output", rank)
    )[0]


def _train(
    case: Case, name: str, guide: Path, directory: Path, rank: int
) -> Tuple[Weights, Trained]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    rows = [
        {
            "query": record["query"],
            "document": record["document"],
            **{f"negative_{i}": text for i, text in enumerate(record["negatives"])},
        }
        for record in case.records()
    ]
    prompts = None
    if case.prompts is not None:
        prompts = {n: case.prompts["query" if n == "query" else "document"] for n in rows[0]}
    with steps_beside.accelerate_worker(rank, case.world_size):
        model = _sentence_transformer(name, case.pooling, case.normalize)
        arguments = SentenceTransformerTrainingArguments(
            **steps_beside.training_arguments(directory, NUM_STEPS, LEARNING_RATE),
            per_device_train_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=case.accumulation,
            prompts=prompts,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            loss=_loss(case, model, guide),
            callbacks=[_SeedsOfSteps()],
        )
        steps_beside.check_worker(trainer, case.world_size)
        trainer.remove_callback(PrinterCallback)
        trainer.args.batch_sampler = _in_order
        initial = dict(_weights_of(model))
        trainer.train()
    return initial, Trained(steps_beside.logged_losses(trainer), dict(_weights_of(model)))


def _loss(case: Case, model: Any, guide: Path) -> torch.nn.Module:
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import cos_sim, dot_score

    arguments: Dict[str, Any] = {"gather_across_devices": case.gathers and case.world_size > 1}
    if case.chunk_size is not None:
        arguments["mini_batch_size"] = case.chunk_size
    if case.loss.endswith(GIST):
        arguments.update(
            guide=_sentence_transformer(str(guide), "mean", normalize=True),
            temperature=case.temperature,
            margin=_GIST_MARGIN,
            contrast_anchors=False,
            contrast_positives=False,
        )
    else:
        arguments.update(
            scale=1 / case.temperature, similarity_fct=cos_sim if case.normalize else dot_score
        )
    if case.bidirectional:
        arguments.update(
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        )
    loss = getattr(losses, case.loss)(model, **arguments)
    if case.matryoshka_dims is not None:
        return losses.MatryoshkaLoss(model, loss, case.matryoshka_dims)
    return loss


def _write_guide(name: str, directory: Path) -> None:
    """Writes a model whose similarity is that of the words that texts have."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=len(tokenizer),
        num_hidden_layers=0,
        num_attention_heads=1,
        hidden_dropout_prob=0.0,
    )
    bert = BertModel(config, **_WITHOUT_POOLER)
    for parameter in bert.embeddings.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.eye_(bert.embeddings.word_embeddings.weight)
    torch.nn.init.ones_(bert.embeddings.LayerNorm.weight)
    bert.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _sentence_transformer(name: str, pooling: str, normalize: bool) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(name, model_kwargs=_WITHOUT_POOLER)
    parts: List[Any] = [
        transformer,
        modules.Pooling(transformer.get_embedding_dimension(), pooling),
    ]
    if normalize:
        parts.append(modules.Normalize())
    return SentenceTransformer(modules=parts, device="cpu")


def _in_order(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Iterable[List[int]]:
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def _weights_of(model: Any) -> Iterator[Tuple[str, np.ndarray]]:
    for name, parameter in model[0].model.named_parameters():
        yield name, parameter.detach().numpy().copy()


class _SeedsOfSteps(TransformersCallback):
    """Seeds each step with its number, for the same dropout."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


class _SeedsOfOwnSteps(TrainerCallback):
    """The same."""

    def __init__(self) -> None:
        super().__init__("")

    @override
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        torch.manual_seed(0)

    @override
    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        batch_number = args[4]
        torch.manual_seed(batch_number)


def train(case: Case, name: str, directory: Path) -> Trained:
    transformer = {"type": "pretrained_transformer", "model_name": name}
    reader = DatasetReader.from_params(
        Params(
            {
                "type": "text_pairs",
                "num_negatives": case.num_negatives,
                "prompts": case.prompts,
                "tokenizer": dict(transformer),
                "token_indexers": {"tokens": dict(transformer)},
            }
        )
    )
    instances = [reader.text_to_instance(**record) for record in case.records()]
    batches: List[Any] = []
    for i in range(0, len(instances), BATCH_SIZE):
        for instance in instances[i : i + BATCH_SIZE]:
            reader.apply_token_indexers(instance)
        batch = Batch(instances[i : i + BATCH_SIZE])
        batch.index_instances(Vocabulary())
        batches.append(batch.as_tensor_dict())
    grad_cache = None
    if case.chunk_size is not None:
        columns = ("query", "document", "negatives")[: 2 + bool(case.num_negatives)]
        # Chunks of one argument at a time, as those of sentence-transformers.
        grad_cache = {"chunk_size": dict.fromkeys(columns, case.chunk_size)}
    side = Side(
        lambda: _bi_encoder(case, name),
        lambda rank: batches[rank :: case.world_size],
        case.stage,
        case.world_size,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        callbacks=lambda: [_SeedsOfOwnSteps(), StepLosses(directory)],
        num_epochs=1,
        num_gradient_accumulation_steps=case.accumulation,
        grad_cache=grad_cache,
    )
    weights = side.on_all_ranks(trained, directory)[0]
    prefix = "_query_encoder._text_field_embedder.token_embedder_tokens.transformer_model."
    return Trained(
        read_step_losses(directory, case.world_size),
        {key.removeprefix(prefix): weight for key, weight in weights.items()},
    )


def _bi_encoder(case: Case, name: str) -> Model:
    embedder = {
        "type": "pretrained_transformer",
        "model_name": name,
        "transformer_kwargs": dict(_WITHOUT_POOLER),
    }
    dim = 32
    pooling = {
        "mean": {"type": "bag_of_embeddings", "averaged": True},
        "cls": {"type": "cls_pooler"},
        "lasttoken": {"type": "cls_pooler", "cls_is_last_token": True},
    }[case.pooling]
    return Model.from_params(
        Params(
            {
                "type": "bi_encoder",
                "text_field_embedder": {"token_embedders": {"tokens": embedder}},
                "seq2vec_encoder": {**pooling, "embedding_dim": dim},
                "normalize": case.normalize,
                "temperature": case.temperature,
                "bidirectional": case.bidirectional,
                "matryoshka_dims": case.matryoshka_dims,
                "negatives": "global" if case.gathers else "local",
            }
        ),
        vocab=Vocabulary(),
    )
