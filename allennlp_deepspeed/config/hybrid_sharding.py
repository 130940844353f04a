"""
Over how many ranks parameters stay sharded once they are gathered.
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
from allennlp_deepspeed.config.schema_validation import ROOT, lookup
from allennlp_deepspeed.config.settings import TrainerSettings

logger = logging.getLogger(__name__)

_PARTITION_SIZE = "zero_optimization.zero_hpz_partition_size"


def resolve_shard_within(config: Dict[str, Any], settings: TrainerSettings) -> None:
    within = settings.shard_within
    if within is None:
        return
    num_ranks, description = _num_ranks_within(within, settings)
    stage = lookup(config, STAGE)
    if stage != 3:
        raise ConfigurationError(
            f"shard_within is {description}, but parameters are sharded only at ZeRO stage 3, and "
            f'{ROOT}.zero_optimization.stage is {stage}: write "stage": 3, or remove shard_within'
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
        return
    if num_ranks < 2 or settings.world_size % num_ranks:
        raise ConfigurationError(
            f"shard_within is {description}, but must be at least 2 and divide the number of "
            f"workers, which is {settings.world_size}: write another number, or remove the key"
        )
    if size is None:
        fill(config, _PARTITION_SIZE, num_ranks, "from shard_within")


def _num_ranks_within(within: Union[int, str], settings: TrainerSettings) -> Tuple[int, str]:
    """The number, and how to say it in a message."""
    if within == "node":
        if settings.workers_per_node is None:
            raise ConfigurationError(
                'shard_within is "node", but nothing says how many workers there are on one, as '
                "the allennlp command does: write the number"
            )
        num_ranks = settings.workers_per_node
        return num_ranks, f'"node" ({num_ranks} worker{"s" if num_ranks > 1 else ""})'
    return int(within), str(within)


def check_partition_size(zero: DeepSpeedZeroConfig, settings: TrainerSettings) -> None:
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
    if zero.offload_param is not None and zero.offload_param.device == "nvme":
        raise ConfigurationError(
            f"{path} is {size}, but DeepSpeed can't keep the second copy of parameters on NVMe: "
            'write "cpu" for zero_optimization.offload_param.device, or shard over all workers'
        )
