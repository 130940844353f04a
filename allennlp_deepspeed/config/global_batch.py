"""
Resolves `"num_gradient_accumulation_steps": "auto"`, which requires a `global_batch_size` that
divides evenly among the workers, and no other key that divides batches.
"""

import json
from typing import Any, Dict, Mapping

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.json_types import is_integer
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT
from allennlp_deepspeed.config.settings import DEFAULT_TYPE, TrainerSettings, registered_name
from allennlp_deepspeed.config.unset_values import configured_value

# AllenNLP's data loaders whose "batch_size" is the size of a batch.
_LOADERS = (DEFAULT_TYPE, "multiprocess", "simple")


def finds_micro_batch_size(trainer: Mapping[str, Any]) -> bool:
    """Returns whether the trainer's keys leave the micro-batch size to the first step."""
    return trainer.get("num_gradient_accumulation_steps") == AUTO


def resolve_worker_batch_size(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> int:
    """
    Computes the number of instances that each worker reads per optimizer step.

    # Parameters

    config : `Dict[str, Any]`, required.
        The configuration in DeepSpeed's schema.
    settings : `TrainerSettings`, required.
        The settings, with accumulation "auto".
    errors : `ConfigErrors`, required.
        Collects a line for each contradicting key.

    # Returns

    `int`
        The number of instances per optimizer step and worker.
    """
    size, workers = settings.global_batch_size, settings.data_parallel_size
    if size is None:
        errors.add(
            "'trainer.num_gradient_accumulation_steps' is \"auto\", but "
            "'trainer.global_batch_size' is unset: write the instances per optimizer step over "
            'all workers, such as "global_batch_size": 32, or a number of accumulation steps'
        )
        return settings.micro_batch_size or 1
    if settings.sequence_parallel_size > 1:
        errors.add(
            f"'trainer.sequence_parallel_size' is {settings.sequence_parallel_size}, but "
            "'trainer.num_gradient_accumulation_steps' \"auto\" needs workers that read different "
            "sequences: write a number of accumulation steps, or remove "
            "'trainer.sequence_parallel_size'"
        )
    share, rest = divmod(size, workers)
    if rest:
        several = [n for n in (share * workers, (share + 1) * workers) if n > 0]
        errors.add(
            f"'trainer.global_batch_size' is {size}, which {workers} workers can't share equally: "
            f"write {' or '.join(map(str, several))}"
        )
    elif settings.micro_batch_size not in (None, share):
        errors.add(
            f"'{settings.micro_batch_size_key}' is {settings.micro_batch_size}, but with "
            f"'trainer.global_batch_size' {size} each of {workers} workers reads {share} "
            f"instances per step, and splits them into micro-batches: write {share}"
        )
    for key, value in (
        ("gradient_accumulation_steps", None),
        ("train_micro_batch_size_per_gpu", None),
        ("train_batch_size", size),
    ):
        written = configured_value(config, key)
        if written not in (None, value):
            errors.add(
                f"'{ROOT}.{key}' is {json.dumps(written)}, but "
                "'trainer.num_gradient_accumulation_steps' is \"auto\", and "
                f"'trainer.global_batch_size' {size}: remove the key"
            )
    return max(1, share)


def refuse_global_batch_size(settings: TrainerSettings, errors: ConfigErrors) -> None:
    """Refuses a `global_batch_size`, for settings whose number of micro-batches isn't "auto"."""
    if settings.global_batch_size is not None:
        errors.add(
            f"'trainer.global_batch_size' is {settings.global_batch_size}, but "
            '\'trainer.num_gradient_accumulation_steps\' isn\'t "auto": write "auto", or remove '
            "'trainer.global_batch_size', which is otherwise data_loader.batch_size x "
            "num_gradient_accumulation_steps x workers"
        )


def refuse_grad_cache(trainer: Mapping[str, Any]) -> None:
    """
    Refuses other keys that divide batches.

    # Parameters

    trainer : `Mapping[str, Any]`, required.
        The trainer's keys.

    # Raises

    `ConfigurationError`
        If "grad_cache" is set as well.
    """
    if finds_micro_batch_size(trainer) and trainer.get("grad_cache") is not None:
        raise ConfigurationError(
            "'trainer.grad_cache' and 'trainer.num_gradient_accumulation_steps' \"auto\" are both "
            "set: the former is for contrastive losses, the latter for losses that are means over "
            'instances or tokens. Remove one of them. "grad_cache": {"chunk_size": "auto"} finds '
            "the largest chunk that fits."
        )


def no_fixed_size_error() -> ConfigurationError:
    """
    Returns the error for data loaders whose batches have no fixed size, so that a worker's share of
    a step is unknown.
    """
    return ConfigurationError(
        "'trainer.num_gradient_accumulation_steps' is \"auto\", but the batches of 'data_loader' "
        "vary in size: write 'data_loader.batch_size', 'trainer.global_batch_size' divided by the "
        "number of workers, instead of a sampler."
    )


def has_fixed_size(data_loader: Any) -> bool:
    """Returns whether the batches of a data loader's section have a fixed size."""
    sampler = data_loader.get("batch_sampler") if isinstance(data_loader, dict) else None
    return sampler is None or (isinstance(sampler, dict) and is_integer(sampler.get("batch_size")))


def fill_batch_size(config: Dict[str, Any], num_workers: int) -> None:
    """
    Sets the data loader's batch size to a worker's share of the global batch, if it is unset.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration. The batch size of its data loader, or of its "bucket"
        sampler, is set in place.
    num_workers : `int`, required.
        The total number of workers.
    """
    trainer, loader = config.get("trainer"), config.get("data_loader")
    if not isinstance(trainer, dict) or not isinstance(loader, dict):
        return
    size = trainer.get("global_batch_size")
    if not finds_micro_batch_size(trainer) or not is_integer(size) or size % num_workers:
        return
    if registered_name(loader) not in _LOADERS or loader.get("batch_size") is not None:
        return
    sampler = loader.get("batch_sampler")
    section = loader if sampler is None else sampler
    is_bucket = registered_name(section) == "bucket" and isinstance(section, dict)
    if (sampler is None or is_bucket) and section.get("batch_size") is None:
        section["batch_size"] = size // num_workers
