"""
Over how many neighbouring ranks parameters stay sharded once they are gathered, or whether they
stay whole.
"""

import json
import logging
from typing import Any, Dict, Tuple, Union

from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from allennlp_deepspeed.config.open_values import (
    STAGE,
    fill,
    said,
)
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT, lookup
from allennlp_deepspeed.config.settings import TrainerSettings

logger = logging.getLogger(__name__)

_PARTITION_SIZE = "zero_optimization.zero_hpz_partition_size"


def resolve_shard_within(
    config: Dict[str, Any], settings: TrainerSettings, accumulates: bool
) -> str:
    """
    Which parameters stay whole on each worker until the step ends once they are gathered: "all",
    "none" or "auto", as many as there is room for. Where they stay sharded over several workers,
    DeepSpeed's partition size is filled.

    # Parameters

    config : `Dict[str, Any]`, required.
    settings : `TrainerSettings`, required.
    accumulates : `bool`, required.
        Whether a step has several micro-batches.
    """
    stage = lookup(config, STAGE)
    if settings.shard_within == AUTO:
        # A pass keeps by itself what its backward pass needs again soon.
        keeps = stage == 3 and accumulates and settings.world_size > 1
        return AUTO if keeps and said(config, _PARTITION_SIZE) in (None, 1) else "none"
    if settings.shard_within is None:
        return "none"
    num_ranks, description = _num_ranks_within("shard_within", settings)
    if stage != 3:
        raise ConfigurationError(
            f"shard_within is {description}, but parameters are sharded only at ZeRO stage 3, and "
            f'{ROOT}.zero_optimization.stage is {stage}: write "stage": 3 or "shard_within": '
            '"auto", or remove shard_within'
        )
    size = said(config, _PARTITION_SIZE)
    if size is not None and size != num_ranks:
        raise ConfigurationError(
            f"shard_within is {description}, but {ROOT}.{_PARTITION_SIZE} is {json.dumps(size)}: "
            "remove one of them, or give both the same value"
        )
    if num_ranks == settings.world_size:
        logger.info(
            "shard_within is %s, which are all: it changes nothing, since parameters are sharded "
            "over all workers anyway",
            description,
        )
        return "none"
    _check_divides("shard_within", num_ranks, description, settings)
    if num_ranks > 1 and size is None:
        fill(config, _PARTITION_SIZE, num_ranks, "from shard_within")
    return "all" if num_ranks == 1 else "none"


def _check_divides(key: str, num_ranks: int, description: str, settings: TrainerSettings) -> None:
    if num_ranks < 1 or settings.world_size % num_ranks:
        raise ConfigurationError(
            f"{key} is {description}, but must be at least 1 and divide the number of "
            f"workers, which is {settings.world_size}: write another number, or remove the key"
        )


def _num_ranks_within(key: str, settings: TrainerSettings) -> Tuple[int, str]:
    """The number, and how to say it in a message."""
    within: Union[int, str] = getattr(settings, key)
    if within == "node":
        if settings.workers_per_node is None:
            raise ConfigurationError(
                f'{key} is "node", but nothing says how many workers there are on one, as '
                "the allennlp command does: write the number"
            )
        num_ranks = settings.workers_per_node
        return num_ranks, f'"node" ({num_ranks} worker{"s" if num_ranks > 1 else ""})'
    return int(within), str(within)


def check_partition_size(
    zero: DeepSpeedZeroConfig, settings: TrainerSettings, kept_parameters: str
) -> None:
    has_nvme_parameters = zero.offload_param is not None and zero.offload_param.device == "nvme"
    if kept_parameters == "all" and has_nvme_parameters:
        raise ConfigurationError(
            "shard_within is 1, but DeepSpeed has only a few buffers for parameters that come from "
            'NVMe: write "cpu" for zero_optimization.offload_param.device, or remove shard_within'
        )
    size = zero.zero_hpz_partition_size
    if size <= 1:
        return
    path = f"{ROOT}.{_PARTITION_SIZE}"
    if zero.stage != 3:
        raise ConfigurationError(
            f"{path} is {size}, but parameters are sharded only at stage 3, and "
            f"{ROOT}.zero_optimization.stage is {int(zero.stage)}: remove the key"
        )
    if settings.world_size % size:
        raise ConfigurationError(
            f"{path} is {size}, but must divide the number of workers, which is "
            f"{settings.world_size}"
        )
    if has_nvme_parameters:
        raise ConfigurationError(
            f"{path} is {size}, but DeepSpeed can't keep the second copy of parameters on NVMe: "
            'write "cpu" for zero_optimization.offload_param.device, or shard over all workers'
        )
