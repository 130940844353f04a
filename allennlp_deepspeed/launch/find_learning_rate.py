"""
AllenNLP's `find-lr` command, and its `search_learning_rate`, for the "deepspeed" trainer, whose
optimizer only the engine can step.

`install` puts itself in front of AllenNLP's functions, which have no seam.

Works around AllenNLP 2.10.1: `find-lr` takes no other trainer than AllenNLP's own. Gone when it
constructs the one of the config.
"""

import functools
import inspect
import itertools
import logging
import math
from types import SimpleNamespace
from typing import Any, Callable, List, Optional, Tuple
from unittest import mock

from allennlp.commands import find_learning_rate
from allennlp.common import Params, Tqdm
from allennlp.common.checks import ConfigurationError
from allennlp.training.trainer import Trainer

from allennlp_deepspeed.launch.preflight import check, fill_in, has_deepspeed_trainer
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer

logger = logging.getLogger(__name__)


def install() -> None:
    """
    Has AllenNLP find learning rates for "deepspeed" trainers too. May be called more than once.
    """
    search = find_learning_rate.search_learning_rate
    find = find_learning_rate.find_learning_rate_model
    if hasattr(find, "takes_deepspeed"):
        return

    @functools.wraps(search)
    def search_learning_rate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(trainer, DeepSpeedTrainer):
            return search(trainer, *args, **kwargs)
        arguments = inspect.signature(search).bind(trainer, *args, **kwargs)
        arguments.apply_defaults()
        if arguments.arguments["num_batches"] <= 10:
            return search(trainer, *args, **kwargs)  # raises
        with trainer.session():
            return _search_with_engine(**arguments.arguments)

    @functools.wraps(find)
    def find_learning_rate_model(params: Params, *args: Any, **kwargs: Any) -> None:
        config = params.as_dict(quiet=True)
        if not has_deepspeed_trainer(config):
            return find(params, *args, **kwargs)
        if config.get("distributed"):
            raise ConfigurationError(
                "'distributed' is in the config, and 'find-lr' searches in one process: give it "
                '--overrides \'{"distributed": null}\', and "cuda_device" in "trainer".'
            )
        fill_in(params)
        check(params)
        # AllenNLP refuses any other type, and constructs the one that there is without.
        trainer_type = params.params["trainer"].pop("type")
        trainer = SimpleNamespace(from_params=_construct(trainer_type))
        with mock.patch.object(find_learning_rate, "Trainer", trainer):
            return find(params, *args, **kwargs)

    find_learning_rate_model.takes_deepspeed = True  # type: ignore[attr-defined]
    find_learning_rate.search_learning_rate = search_learning_rate
    find_learning_rate.find_learning_rate_model = find_learning_rate_model


def _construct(trainer_type: str) -> Callable[..., Trainer]:
    def from_params(params: Params, **extras: Any) -> Trainer:
        params["type"] = trainer_type
        return Trainer.from_params(params=params, **extras)

    return from_params


def _search_with_engine(
    trainer: DeepSpeedTrainer,
    start_lr: float,
    end_lr: float,
    num_batches: int,
    linear_steps: bool,
    stopping_factor: Optional[float],
) -> Tuple[List[float], List[float]]:
    """AllenNLP's loop, with the engine's backward pass and step."""
    trainer.model.train()
    if linear_steps:
        factor = (end_lr - start_lr) / num_batches
    else:
        factor = (end_lr / start_lr) ** (1.0 / num_batches)
    learning_rates: List[float] = []
    losses: List[float] = []
    best = 1e9
    batches = itertools.islice(itertools.cycle(trainer.data_loader), num_batches + 1)
    for i, batch in enumerate(Tqdm.tqdm(batches, total=num_batches)):
        learning_rate = start_lr + factor * i if linear_steps else start_lr * factor**i
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = trainer.go_backward(batch)
        if stopping_factor is not None and (math.isnan(loss) or loss > stopping_factor * best):
            logger.info("Loss (%s) exceeds stopping_factor * lowest recorded loss.", loss)
            break
        trainer.step_optimizer()
        learning_rates.append(learning_rate)
        losses.append(loss)
        if loss < best and i > 10:
            best = loss
    return learning_rates, losses
