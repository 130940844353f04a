"""
Constructs the model of a config beforehand, without memory for its weights and with a vocabulary
that stands in for its own. Only models of which it is known that any vocabulary will do, and that
need no pretrained weights.
"""

import json
import re
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import BasicClassifier, Model, SimpleTagger

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema import did_you_mean
from allennlp_deepspeed.contrastive import BiEncoder, ContrastiveModel, RetrievalMetric
from allennlp_deepspeed.language_modeling import CausalLM
from allennlp_deepspeed.meta_model import construct_on_meta_device
from allennlp_deepspeed.signatures.callers import is_own_code
from allennlp_deepspeed.signatures.failed_section import explanation

_KNOWN = (BasicClassifier, SimpleTagger, BiEncoder, CausalLM)

# Keys of weights that would be read.
_OF_PRETRAINED = ("_pretrained", "model_name", "pretrained_file", "archive_file", "options_file")

# Readers that index texts with "token_indexers", and have one named "tokens" without.
_INDEXING = ("text_classification_json", "sequence_tagging", "text_pairs")

# What AllenNLP adds to a model's.
_METRICS = {"loss", "batch_loss", "reg_loss", "batch_reg_loss"}


def check_model(config: Dict[str, Any], findings: Findings) -> None:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration, without what is known to be wrong.
    findings : `Findings`, required.
        Gets a line if the model can't be constructed, if the sizes of its parts don't fit, or if a
        key of the trainer names nothing of it.
    """
    section = config.get("model")
    if not isinstance(section, dict) or section.get("type") not in Model.list_available():
        return
    if Model.by_name(section["type"]) not in _KNOWN:
        return
    _check_metric(config, _metrics_of_ours(section), findings)
    if _has_key(section, _OF_PRETRAINED):
        return
    _check_indexers(config, findings)
    model = _construct(section, findings)
    if model is None:
        return
    for line in _misfits(model):
        findings.add(line)
    _check_trainer(config, model, findings)


def _has_key(value: Any, names: Tuple[str, ...]) -> bool:
    if isinstance(value, dict):
        return any(n in value for n in names) or any(_has_key(v, names) for v in value.values())
    return isinstance(value, list) and any(_has_key(item, names) for item in value)


def _construct(section: Dict[str, Any], findings: Findings) -> Optional[Model]:
    vocabulary = Vocabulary()
    for name in ("one", "two", "three"):
        vocabulary.add_token_to_namespace(name, "labels")
        vocabulary.add_token_to_namespace(name, "tokens")
    with tempfile.TemporaryDirectory() as directory:
        try:
            params = Params(json.loads(json.dumps(section)))
            return construct_on_meta_device(params, vocabulary, directory)
        except Exception as error:
            message = explanation(error) or str(error)
            section_of_it = message.split("'")[1] if message.startswith("'model") else "model"
            # Not what can't be done without memory only, nor what it lacks because it was wrong.
            if (
                "meta" not in message
                and not isinstance(error, NotImplementedError)
                and not findings.has_refused_within(section_of_it)
            ):
                findings.add(message if message.startswith("'model") else _in_model(message))
            return None


def _in_model(message: str) -> str:
    path, quote, text = message.removeprefix("'").partition("': ")
    if not message.startswith("'") or not quote:
        return f"'model': {message}"
    return f"'model.{path}': {text}" if path else f"'model': {text}"


def _misfits(model: Model) -> Iterator[str]:
    parts = dict(model.named_children())
    if type(model) is BiEncoder:
        parts = dict(parts["_query_encoder"].named_children())
    elif type(model) is not BasicClassifier:
        return  # which compare sizes themselves
    names = ("_text_field_embedder", "_seq2seq_encoder", "_seq2vec_encoder", "_feedforward")
    chain = [(name[1:], parts[name]) for name in names if parts.get(name) is not None]
    for (giver, before), (taker, after) in zip(chain, chain[1:]):
        if not (is_own_code(type(before)) and is_own_code(type(after))):
            continue
        given, taken = before.get_output_dim(), after.get_input_dim()  # type: ignore[operator]
        if given != taken:
            yield (
                f"'model.{taker}' takes vectors of {taken} dimensions, but 'model.{giver}' gives "
                f"them {given}: write the same for both"
            )


def _check_indexers(config: Dict[str, Any], findings: Findings) -> None:
    reader, model = config.get("dataset_reader"), config["model"]
    if not isinstance(reader, dict) or reader.get("type") not in _INDEXING:
        return
    embedder = model.get("text_field_embedder")
    embedders = embedder.get("token_embedders") if isinstance(embedder, dict) else None
    indexers = reader.get("token_indexers") or {"tokens": {}}
    if not isinstance(embedders, dict) or not isinstance(indexers, dict):
        return
    if embedder.get("type", "basic") != "basic" or "empty" in json.dumps(embedders):
        return
    _check_vocabulary(config, findings)
    if embedders.keys() != indexers.keys():
        findings.add(
            "'model.text_field_embedder.token_embedders' has "
            f"{_listed(embedders)}, but 'dataset_reader.token_indexers' has {_listed(indexers)}"
            f"{'' if 'token_indexers' in reader else ' if it says nothing'}: give both the same"
        )


def _check_vocabulary(config: Dict[str, Any], findings: Findings) -> None:
    """Namespaces that there will be none of, which AllenNLP refuses when it has read the data."""
    vocabulary, reader = config.get("vocabulary"), config["dataset_reader"]
    if not isinstance(vocabulary, dict) or vocabulary.get("type", "from_instances") != (
        "from_instances"
    ):
        return
    indexers = list((reader.get("token_indexers") or {"tokens": "single_id"}).values())
    # Those of one word each, into the namespace of its default.
    if all(indexer in ("single_id", {"type": "single_id"}) for indexer in indexers):
        known = ["tokens", "labels"]
        for name in vocabulary.get("min_count") or {}:
            if name not in known:
                findings.add(
                    f"'vocabulary.min_count.{name}' is for words of a namespace that no token "
                    f"indexer has: {did_you_mean(name, known)}"
                )
    size = vocabulary.get("max_vocab_size")
    has_labels = reader["type"] != "text_pairs" and not reader.get("skip_label_indexing")
    if has_labels and isinstance(size, int) and size < 0:
        findings.add(f"'vocabulary.max_vocab_size' is {size}: must be at least 1, or null")


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names)) or "none"


def _check_trainer(config: Dict[str, Any], model: Model, findings: Findings) -> None:
    trainer = config["trainer"]
    frozen = trainer.get("no_grad") or []
    if isinstance(frozen, list) and frozen:
        names = [name for name, _ in model.named_parameters()]
        if names and all(any(re.search(p, name) for p in frozen) for name in names):
            findings.add(
                f"'trainer.no_grad' is {json.dumps(frozen)}, which every parameter of the model "
                "matches, so that none is trained: name fewer"
            )
    if trainer.get("grad_cache") is not None and not isinstance(model, ContrastiveModel):
        findings.add(
            f"'trainer.grad_cache' is for contrastive models, and '{config['model']['type']}' is "
            "none: remove the key"
        )
    patterns = trainer.get("activation_checkpointing")
    if isinstance(patterns, list):
        modules = [name for name, _ in model.named_modules() if name]
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in modules):
                findings.add(
                    f"'trainer.activation_checkpointing' has {json.dumps(pattern)}, but the name "
                    f"of no module matches it: there are {', '.join(modules[:5])}, ..."
                )
    _check_metric(config, _metrics(model), findings)


def _check_metric(config: Dict[str, Any], known: Set[str], findings: Findings) -> None:
    """`known` is empty where it isn't known which metrics there will be."""
    if config.get("validation_data_path") is None:
        return
    names = config["trainer"].get("validation_metric", "-loss")
    for name in [names] if isinstance(names, str) else names:
        if known and name[:1] in ("+", "-") and name[1:] not in known:
            findings.add(
                f"'trainer.validation_metric' is {json.dumps(names)}, but the model has no metric "
                f"'{name[1:]}': it has {', '.join(sorted(known))}"
            )


def _metrics_of_ours(section: Dict[str, Any]) -> Set[str]:
    """Of models of this package, which have none before they have seen data; empty for others."""
    model = Model.by_name(section["type"])
    if model is CausalLM:
        return {"perplexity", "token_accuracy", *_METRICS}
    if model is not BiEncoder:
        return set()
    try:
        of_retrieval = RetrievalMetric(section.get("recall_at")).names
    except (ConfigurationError, TypeError):
        return set()  # which is said where the model is constructed
    return {"in_batch_accuracy", *of_retrieval, *_METRICS}


def _metrics(model: Model) -> Set[str]:
    """Empty if it isn't known which there will be."""
    if getattr(model, "calculate_span_f1", False):
        return set()
    try:
        names: List[str] = list(model.get_metrics())
    except Exception:
        return set()  # without data
    return {*names, *_METRICS} if names else set()
