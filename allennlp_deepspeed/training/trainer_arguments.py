"""Declares the arguments of the trainer, for Python and for config files."""

import functools
import inspect
import os
from dataclasses import KW_ONLY, dataclass, fields
from typing import (
    Any,
    Callable,
    Concatenate,
    Dict,
    List,
    Literal,
    Optional,
    ParamSpec,
    Sequence,
    TypeVar,
    Union,
)

import torch
from allennlp.common import Lazy
from allennlp.data.data_loaders import DataLoader
from allennlp.models import Model
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import NEW_TRAINER_KEYS, TRAINER_KEYS
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.key_validation import check_values

P = ParamSpec("P")
T = TypeVar("T")

# An object as in AllenNLP, or one that is constructed after the engine, as from a config file.
MaybeLazy = Union[T, Lazy[T], None]


@dataclass(frozen=True)
class TrainerArguments:
    """
    The arguments of [`DeepSpeedTrainer`](./trainer.py), in AllenNLP's order.

    # Raises

    `ConfigurationError`
        If a value is invalid.
    """

    model: Model
    optimizer: Union[torch.optim.Optimizer, Lazy[Optimizer], None]
    data_loader: DataLoader
    patience: Optional[int] = None
    validation_metric: Union[str, List[str]] = "-loss"
    validation_data_loader: Optional[DataLoader] = None
    num_epochs: int = 20
    serialization_dir: Union[str, os.PathLike, None] = None
    checkpointer: MaybeLazy[Checkpointer] = None
    cuda_device: Union[int, torch.device, None] = None
    grad_norm: Union[float, bool, None] = None
    grad_clipping: Optional[float] = None
    learning_rate_scheduler: MaybeLazy[LearningRateScheduler] = None
    momentum_scheduler: MaybeLazy[MomentumScheduler] = None
    moving_average: MaybeLazy[MovingAverage] = None
    callbacks: Optional[Sequence[Union[TrainerCallback, Lazy[TrainerCallback]]]] = None
    distributed: bool = False
    local_rank: int = 0
    world_size: int = 1
    num_gradient_accumulation_steps: Union[int, Literal["auto"], None] = None
    use_amp: Optional[bool] = None
    enable_default_callbacks: bool = True
    run_confidence_checks: bool = True
    grad_scaling: bool = True
    _: KW_ONLY
    deepspeed_config: Union[DeepSpeedConfig, Dict[str, Any], str, None] = "zero_2"
    no_grad: Optional[List[str]] = None
    ddp_accelerator: Optional[DdpAccelerator] = None
    global_batch_size: Optional[int] = None
    gradient_synchronization: str = "auto"
    half_precision_autocast: Union[bool, str] = "auto"
    reshard_after_micro_batch: Union[bool, str] = "auto"
    activation_checkpointing: Optional[List[str]] = None
    torch_compile: Union[bool, Dict[str, Any], None] = None
    grad_cache: Optional[Dict[str, Any]] = None
    sequence_parallel_size: int = 1
    sequence_tiling: Optional[Dict[str, Any]] = None
    log_every_num_steps: Optional[int] = None
    resume: Optional[str] = None

    def __post_init__(self) -> None:
        errors = ConfigErrors()
        check_values("trainer", TRAINER_KEYS, vars(self), errors)
        errors.raise_any()

    def allennlp_arguments(self) -> Dict[str, Any]:
        """Returns the arguments of AllenNLP's trainer, by name."""
        own = {*NEW_TRAINER_KEYS, "ddp_accelerator", "no_grad"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}


def construct_from_fields(
    arguments: Callable[P, T],
) -> Callable[..., Callable[Concatenate[Any, P], None]]:
    """
    Decorator of a constructor with one argument, a dataclass. Callers pass the dataclass's fields.
    """

    def decorate(function: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(function)
        def construct(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            function(self, arguments(*args, **kwargs))

        this = next(iter(inspect.signature(function).parameters.values()))
        others = inspect.signature(arguments).parameters.values()
        construct.__signature__ = inspect.Signature([this, *others])  # type: ignore[attr-defined]
        return construct

    return decorate


def declare_parameters(
    arguments: Callable[..., Any], overridden: Callable[..., Any]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """
    Decorator of a class method with variable keyword arguments. Declares each of `arguments` for
    `FromParams`, which reads the signature. Those of the class method that it overrides may be
    given by position.
    """
    positional = [
        parameter.name
        for parameter in inspect.signature(overridden).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        this, *own, kwargs = inspect.signature(method).parameters.values()
        parameters = {p.name: p for p in [*inspect.signature(arguments).parameters.values(), *own]}
        first = [parameters.pop(name).replace(kind=kind) for name in positional]

        @functools.wraps(method)
        def construct(cls: Any, *args: Any, **kwargs: Any) -> T:
            if len(args) > len(positional):
                raise TypeError(f"{method.__name__}() takes {len(positional)} positional arguments")
            return method(cls, **dict(zip(positional, args)), **kwargs)

        named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
        signature = inspect.Signature([this, *first, *named, kwargs])
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct

    return decorate
