from contextlib import ExitStack
from typing import Any, ClassVar, Dict, Optional, Tuple, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpAccelerator, DdpWrappedModel
from overrides import overrides

from allennlp_deepspeed.engine.partitioned_construction import (
    PartitionedConstruction,
    is_partitioned,
)


@DdpAccelerator.register("deepspeed")
class DeepSpeedDdpAccelerator(DdpAccelerator):
    """
    For models that call `ddp_accelerator.wrap_module` on the modules that they are made of, as
    AllenNLP's T5 does: at ZeRO stage 3 such a module is partitioned over the ranks before the next
    one is constructed. Models that don't are constructed partitioned with the top-level `"type":
    "deepspeed"`, with which this accelerator isn't needed.

    Registered as a `DdpAccelerator` with name "deepspeed":

    ```jsonnet
    "distributed": {"cuda_devices": [0, 1], "ddp_accelerator": "deepspeed"}
    ```

    Every rank must construct it, wrap the same modules, and call `finish`, as the trainer does:
    until then a [`PartitionedConstruction`](./partitioned_construction.py) is open.

    # Parameters

    deepspeed_config : `Dict[str, Any]`, optional (default = `None`)
        How parameters are partitioned: in a config file not given, because the train command tells
        it what the trainer's says. `None` where nobody tells it partitions nothing.
    find_unused_parameters : `bool`, optional (default = `False`)
        As in `TorchDdpAccelerator`.
    local_rank : `int`, optional (default = `None`)
    world_size : `int`, optional (default = `None`)
    cuda_device : `Union[torch.device, int]`, optional (default = `-1`)
    """

    partitioning: ClassVar[Optional[Dict[str, Any]]] = None
    """What the train command has told this worker, which constructs it without the trainer."""

    def __init__(
        self,
        deepspeed_config: Optional[Dict[str, Any]] = None,
        find_unused_parameters: bool = False,
        local_rank: Optional[int] = None,
        world_size: Optional[int] = None,
        cuda_device: Union[torch.device, int] = -1,
    ) -> None:
        super().__init__(local_rank=local_rank, world_size=world_size, cuda_device=cuda_device)
        self.find_unused_parameters = find_unused_parameters
        self._until_finished = ExitStack()
        self._construction: Optional[PartitionedConstruction] = None
        partitioning = self.partitioning or deepspeed_config or {}
        if is_partitioned(partitioning):
            self._construction = self._until_finished.enter_context(
                PartitionedConstruction(
                    partitioning, self.cuda_device, self.local_rank, everything=False
                )
            )

    @classmethod
    def tell(cls, partitioning: Dict[str, Any]) -> None:
        """
        Says how those that this process constructs are to partition parameters.

        # Parameters

        partitioning : `Dict[str, Any]`, required.
            As `DeepSpeedConfig.partitioning` gives it.
        """
        cls.partitioning = partitioning

    @overrides
    def wrap_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Partitions the module's parameters at stage 3. To be called by every rank."""
        if self._construction is not None:
            self._construction.partition(module)
        return module

    def finish(self, model: Model) -> None:
        """
        Ends the construction of a model. The trainer calls it before it brings the engine up; every
        rank must.
        """
        with self._until_finished:
            if self._construction is not None:
                self._construction.finish(model)

    @overrides
    def wrap_model(self, model: Model) -> Tuple[Model, DdpWrappedModel]:
        raise ConfigurationError(
            "'distributed.ddp_accelerator' is 'deepspeed', which only the 'deepspeed' trainer can "
            'use: add "type": "deepspeed" to the trainer, or leave the accelerator out.'
        )
