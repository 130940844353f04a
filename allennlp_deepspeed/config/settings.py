"""Collects the settings that DeepSpeed's configuration is filled from."""

from dataclasses import dataclass, fields, replace
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from allennlp_deepspeed.config.declared_keys import EngineKeys
from allennlp_deepspeed.config.schema_validation import lookup
from allennlp_deepspeed.deepspeed_api import DeepSpeedZeroConfig

DEFAULT_TYPE = "of the default type"
"""The name of an object without a `"type"`."""


def registered_name(component: Any) -> Optional[str]:
    """
    Returns the registered name of a component in a config file, `None` if the component is unset.
    """
    if isinstance(component, dict):
        return component.get("type", DEFAULT_TYPE)
    return component


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(EngineKeys):
    """
    Settings of the AllenNLP side, from a config file or from objects: keys of the trainer, and
    facts of the data, the optimizer and the machine. `None` means unset.

    # Parameters

    optimizer : `str`, optional (default = `None`)
        The registered name or the class name of the AllenNLP optimizer.
    learning_rate : `Union[float, List[float]]`, optional (default = `None`)
        The learning rate of the AllenNLP optimizer.
    learning_rate_scheduler : `str`, optional (default = `None`)
        The registered name or the class name of the AllenNLP scheduler.
    micro_batch_size : `int`, optional (default = `None`)
        The data loader's batch size. `None` if it is unknown or varies.
    micro_batch_size_key : `str`, optional (default = `"data_loader.batch_size"`)
        Where the config has it.
    num_epochs : `int`, optional (default = `None`)
    batches_per_epoch : `int`, optional (default = `None`)
        The length of an epoch in micro-batches.
    world_size : `int`, optional (default = `1`)
    device_type : `str`, optional (default = `"cpu"`)
        "cpu" or "cuda".
    bf16_supported : `bool`, optional (default = `True`)
        Whether the device supports bf16.
    serialization_dir : `str`, optional (default = `None`)
    workers_per_node : `int`, optional (default = `None`)
        `None` if it is unknown.

    All others are [`EngineKeys`](./declared_keys.py).
    """

    optimizer: Optional[str] = None
    learning_rate: Union[float, List[float], None] = None
    learning_rate_scheduler: Optional[str] = None
    micro_batch_size: Optional[int] = None
    micro_batch_size_key: str = "data_loader.batch_size"
    num_epochs: Optional[int] = None
    batches_per_epoch: Optional[int] = None
    world_size: int = 1
    device_type: str = "cpu"
    bf16_supported: bool = True
    serialization_dir: Optional[str] = None
    workers_per_node: Optional[int] = None

    @property
    def data_parallel_size(self) -> int:
        """
        The number of workers that read different data. A group of workers that share sequences
        counts once.
        """
        return max(1, self.world_size // self.sequence_parallel_size)

    @classmethod
    def from_config(
        cls, config: Dict[str, Any], deepspeed_config: Dict[str, Any], **others: Any
    ) -> "TrainerSettings":
        """
        Returns the settings that the trainer will have when it is constructed. Values that are
        unknown before are stand-ins: the length of the epoch, and the learning rate of an optimizer
        whose section sets none.

        # Parameters

        config : `Dict[str, Any]`, required.
            A complete training configuration.
        deepspeed_config : `Dict[str, Any]`, required.
            Its `trainer.deepspeed_config` in DeepSpeed's schema.
        others : `Any`
            Settings that aren't in the config: the workers, their devices and directories.
        """
        trainer = config["trainer"]
        optimizer = trainer.get("optimizer")
        learning_rate = optimizer.get("lr", 1.0) if isinstance(optimizer, dict) else 1.0
        if optimizer is None and "optimizer" in deepspeed_config:
            learning_rate = None  # DeepSpeed's own section sets it
        size_key, micro_batch_size = _batch_size(config.get("data_loader"))
        return cls(
            **cls._keys(trainer),
            optimizer=registered_name(optimizer),
            learning_rate=learning_rate,
            learning_rate_scheduler=registered_name(trainer.get("learning_rate_scheduler")),
            micro_batch_size=micro_batch_size,
            micro_batch_size_key=size_key,
            num_epochs=trainer.get("num_epochs", 20),
            batches_per_epoch=1,
            **others,
        )

    @classmethod
    def from_objects(
        cls,
        arguments: Dict[str, Any],
        optimizer: Optional[torch.optim.Optimizer],
        learning_rate_scheduler: Any,
        **others: Any,
    ) -> "TrainerSettings":
        """
        Returns the settings of a trainer that is being constructed.

        # Parameters

        arguments : `Dict[str, Any]`, required.
            The arguments of the trainer.
        optimizer : `Optional[torch.optim.Optimizer]`, required.
        learning_rate_scheduler : `Any`, required.
            `None` if there is none.
        others : `Any`
            Settings of the data, the workers, their devices and directories.
        """
        scheduler = learning_rate_scheduler
        return cls(
            **cls._keys(arguments),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            learning_rate=None if optimizer is None else _learning_rate(optimizer),
            learning_rate_scheduler=None if scheduler is None else type(scheduler).__name__,
            num_epochs=arguments.get("num_epochs", 20),
            **others,
        )

    @classmethod
    def _keys(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the trainer's keys that DeepSpeed's configuration depends on, unchanged."""
        return {key.name: values.get(key.name, key.default) for key in fields(EngineKeys)}


@dataclass(frozen=True)
class ResolvedConfig:
    """
    Configuration without unset values.

    # Parameters

    engine_config : `Dict[str, Any]`
        The configuration for `deepspeed.initialize`. Its gradient accumulation is always 1: the
        trainer, not the engine, knows the gradient accumulation boundaries.
    num_gradient_accumulation_steps : `int`
        The number that the trainer uses. With "auto" it is 1, because a batch of the data loader is
        a worker's share of a step.
    grad_norm : `Union[float, bool]`
        The norm that gradients are clipped to, `True` to report their norm without clipping, or
        `False`.
    zero_stage : `int`
    precision : `str`
        "fp32", "bf16", "fp16" or "torch_autocast".
    half_precision_autocast : `Union[bool, str]`
        Whether the forward pass runs under autocast in bf16 and fp16, "auto" for a part of it.
    has_optimizer : `bool`
        Whether DeepSpeed builds the optimizer.
    has_scheduler : `bool`
        Whether DeepSpeed builds the learning rate scheduler.
    offload_device : `str`
        The device of the optimizer states and the optimizer step: "cpu", "nvme" with the step on
        the CPU, or "none" for the device that the model trains on.
    reshard_after_micro_batch : `Union[bool, str]`
        "auto" if it depends on the free memory. `True` at stages other than 3.
    reshard_in_evaluation : `Union[bool, str]`
        The same for forward passes of an evaluation.
    torch_compile : `Dict[str, Any]`, optional
        The arguments of `torch.compile`, `None` if nothing is compiled.
    finds_micro_batch_size : `bool`, optional (default = `False`)
        Whether the trainer divides each batch into the fewest micro-batches that fit into memory.
    """

    engine_config: Dict[str, Any]
    num_gradient_accumulation_steps: int
    grad_norm: Union[float, bool]
    zero_stage: int
    precision: str
    half_precision_autocast: Union[bool, str]
    has_optimizer: bool
    has_scheduler: bool
    offload_device: str
    reshard_after_micro_batch: Union[bool, str]
    reshard_in_evaluation: Union[bool, str]
    torch_compile: Optional[Dict[str, Any]]
    finds_micro_batch_size: bool = False

    @property
    def accumulates(self) -> bool:
        """Returns whether a step may have several micro-batches."""
        return self.finds_micro_batch_size or self.num_gradient_accumulation_steps > 1

    def limit_buckets(self, num_elements: int) -> "ResolvedConfig":
        """
        Returns a configuration in which a bucket of gradients that the config doesn't size isn't
        larger than all gradients. DeepSpeed allocates buckets in full.

        # Parameters

        num_elements : `int`
            The number of elements of all trainable parameters.
        """
        section = self.engine_config.get("zero_optimization", {})
        is_smaller = num_elements < DeepSpeedZeroConfig().reduce_bucket_size
        if self.zero_stage == 0 or "reduce_bucket_size" in section or not is_smaller:
            return self
        section = {**section, "reduce_bucket_size": max(1, num_elements)}
        return replace(self, engine_config={**self.engine_config, "zero_optimization": section})


def fixed_size(batch_size: Any) -> Optional[int]:
    """
    Returns `batch_size` if it is a fixed size, else `None`. AllenNLP's samplers report -1 or `None`
    if it varies.
    """
    return batch_size if isinstance(batch_size, int) and batch_size > 0 else None


def _batch_size(data_loader: Any) -> Tuple[str, Optional[int]]:
    """Returns the key of a data loader's batch size, and the size."""
    for key in ("data_loader.batch_size", "data_loader.batch_sampler.batch_size"):
        size = lookup({"data_loader": data_loader}, key)
        if size is not None:
            return key, fixed_size(size)
    return "data_loader.batch_size", None


def _learning_rate(optimizer: torch.optim.Optimizer) -> Union[float, List[float], None]:
    """Returns the learning rate of all groups, or that of each if they have different ones."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    has_all = len(rates) == len(optimizer.param_groups) and len(set(rates)) > 1
    rate: Optional[float] = optimizer.defaults.get("lr")
    return rates if has_all else rate
