"""Warns of settings that are valid, but rarely what is meant."""

import re
from typing import Any, Dict, Iterator, List, Set, Tuple

from allennlp_deepspeed.config.json_types import as_json, is_number
from allennlp_deepspeed.config.key_validation import did_you_mean

# Parts of the names of metrics, by the sign that a better value has.
_BETTER = {
    "-": re.compile("accuracy|f1|precision|recall|auc|bleu|rouge|mrr|ndcg|_map$|^map$", re.I),
    "+": re.compile("loss|perplexity|error", re.I),
}

_PREFIX = re.compile("(validation|training|val|eval|dev|test|best_validation)_")

_MISMATCHED = ("pretrained_transformer", "pretrained_transformer_mismatched")

# Keys that split a text in the indexer as they join it in the embedder.
_SHARED = ("model_name", "max_length")


def warnings_about(config: Dict[str, Any]) -> List[str]:
    """
    Returns a sentence, without its end, for each setting that is likely a mistake.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration that has been checked.
    """
    abouts = (_about_validation, _about_data, _about_optimizer, _about_tokens, _about_indexers)
    return [warning for about in abouts for warning in about(config)]


def unknown_metrics(trainer: Dict[str, Any], known: Set[str]) -> Iterator[str]:
    """Yields a sentence for each metric in 'validation_metric' that isn't known."""
    for metric in _metrics(trainer):
        if metric[1:] not in known and _PREFIX.match(metric[1:]) is None:
            hint = did_you_mean(metric[1:], sorted(known))
            yield (
                f"'trainer.validation_metric' has \"{metric}\", which the model doesn't report "
                f"after the first instances: {hint}"
            )


def _metrics(trainer: Dict[str, Any]) -> List[str]:
    metrics = trainer.get("validation_metric") or []
    return [metrics] if isinstance(metrics, str) else metrics


def _about_data(config: Dict[str, Any]) -> Iterator[str]:
    loader, validation = config.get("data_loader"), config.get("validation_data_path")
    if validation is not None and validation == config.get("train_data_path"):
        yield "'validation_data_path' is the same as 'train_data_path'"
    for key, path in (
        ("evaluate_on_test", "test_data_path"),
        ("validation_data_loader", "validation_data_path"),
        ("validation_dataset_reader", "validation_data_path"),
    ):
        if config.get(key) and not (config.get(path) or config.get("test_data_path")):
            yield f"'{key}' has no effect without a '{path}'"
    if not isinstance(loader, dict):
        return
    batches = loader.get("batches_per_epoch")
    if batches and validation and config.get("validation_data_loader") is None:
        yield (
            f"'data_loader.batches_per_epoch' is {as_json(batches)}, and each validation reads the "
            "next batches of its data, too: write a 'validation_data_loader' without it"
        )
    limit, sampler = loader.get("max_instances_in_memory"), loader.get("batch_sampler")
    size = sampler.get("batch_size") if isinstance(sampler, dict) else None
    if limit and size and limit < size:
        yield (
            f"'data_loader.max_instances_in_memory' is {as_json(limit)}, so that no batch has the "
            f"{as_json(size)} instances of 'data_loader.batch_sampler.batch_size'"
        )


def _about_validation(config: Dict[str, Any]) -> Iterator[str]:
    trainer = config["trainer"]
    if not config.get("validation_data_path"):
        for key in ("patience", "validation_metric"):
            if trainer.get(key) is not None:
                yield (
                    f"'trainer.{key}' is {as_json(trainer[key])}, but has no effect without a "
                    "'validation_data_path'"
                )
        return
    for metric in _metrics(trainer):
        sign, name = metric[0], metric[1:]
        prefix = _PREFIX.match(name)
        if prefix is not None:
            yield (
                f"'trainer.validation_metric' has \"{metric}\", but names of metrics have no "
                f'prefix here: write "{sign}{name[prefix.end() :]}"'
            )
        elif _BETTER[sign].search(name):
            other, best = ("+", "lowest") if sign == "-" else ("-", "highest")
            yield (
                f"'trainer.validation_metric' has \"{metric}\", by which the best epoch is that of "
                f'the {best} {name}: write "{other}{name}" if it isn\'t meant'
            )


def _about_optimizer(config: Dict[str, Any]) -> Iterator[str]:
    trainer = config["trainer"]
    optimizer, schedule = trainer.get("optimizer"), trainer.get("learning_rate_scheduler")
    rate = optimizer.get("lr") if isinstance(optimizer, dict) else None
    if is_number(rate) and rate >= 1 and "adam" in str(optimizer.get("type", "adam")).lower():
        yield f"'trainer.optimizer.lr' is {as_json(rate)}, the change of a weight in a step of Adam"
    num_epochs = schedule.get("num_epochs") if isinstance(schedule, dict) else None
    if num_epochs not in (None, trainer.get("num_epochs", 20)):
        yield (
            f"'trainer.learning_rate_scheduler.num_epochs' is {as_json(num_epochs)}, but "
            f"'trainer.num_epochs' {as_json(trainer.get('num_epochs', 20))}: remove the former"
        )


def _about_tokens(config: Dict[str, Any]) -> Iterator[str]:
    """Compares the tokenizer of a reader with its indexers."""
    reader = config.get("dataset_reader")
    tokenizer = _type(reader.get("tokenizer")) if isinstance(reader, dict) else None
    if not isinstance(reader, dict) or tokenizer is None:
        return
    is_transformers = tokenizer == _MISMATCHED[0]
    indexers = reader.get("token_indexers")
    for name, indexer in indexers.items() if isinstance(indexers, dict) else ():
        if _type(indexer) == _MISMATCHED[is_transformers]:
            words = "wordpieces" if is_transformers else "words"
            yield (
                f"'dataset_reader.tokenizer' is a {tokenizer}, which makes {words}, but "
                f"'dataset_reader.token_indexers.{name}' is a {_type(indexer)}: write "
                f'"{_MISMATCHED[not is_transformers]}", in the embedder, too'
            )


def _about_indexers(config: Dict[str, Any]) -> Iterator[str]:
    """Compares the only indexers of a config with the only embedder."""
    indexers = list(_sections(config.get("dataset_reader"), "token_indexers", "dataset_reader"))
    embedders = list(_sections(config.get("model"), "token_embedders", "model"))
    if len(indexers) != 1 or len(embedders) != 1:
        return
    (of_indexers, indexed), (of_embedders, embedded) = indexers[0], embedders[0]
    for path, names, other, others in (
        (of_indexers, indexed, of_embedders, embedded),
        (of_embedders, embedded, of_indexers, indexed),
    ):
        for name in names.keys() - others.keys():
            yield f"'{path}' has \"{name}\", which '{other}' hasn't: each needs the same names"
    for name in indexed.keys() & embedded.keys():
        types = [_type(section[name]) for section in (indexed, embedded)]
        if types[0] != types[1] and all(each in _MISMATCHED for each in types):
            yield (
                f"'{of_indexers}.{name}' is a {types[0]}, but '{of_embedders}.{name}' a "
                f"{types[1]}: write the same type for both"
            )
        for key in _SHARED if all(each in _MISMATCHED for each in types) else ():
            values = [section[name].get(key) for section in (indexed, embedded)]
            if values[0] != values[1]:
                yield (
                    f"'{of_indexers}.{name}.{key}' is {as_json(values[0])}, but "
                    f"'{of_embedders}.{name}.{key}' {as_json(values[1])}: write the same for both"
                )


def _sections(value: Any, key: str, path: str) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yields the sections of this name in a part of a config, with their paths."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    for name, section in value.items():
        if name == key and isinstance(section, dict):
            yield f"{path}.{name}", section
        else:
            yield from _sections(section, key, f"{path}.{name}")


def _type(section: Any) -> Any:
    return section.get("type") if isinstance(section, dict) else section
