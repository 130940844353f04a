from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Dict

import torch
from allennlp.common import Params
from allennlp.data import DataLoader
from allennlp.models.model import Model
from allennlp.training.optimizers import Optimizer

from evidence.harness.process_tree import Worker

SEED = 13


class Workload(ABC):
    """
    What all contenders train: the model, the data, the optimizer and DeepSpeed's configuration.

    # Attributes

    directory : `Path`
        For the files of `prepare`.
    stage : `int`
        Of ZeRO.
    accumulation : `int`
        Micro-batches in an optimizer step.
    batch_size : `int`
        Of a micro-batch of a rank.
    optimizer : `Dict[str, Any]`
        As in a config file.
    """

    directory: Path
    stage: int
    accumulation: int
    batch_size: int
    optimizer: Dict[str, Any]

    @property
    def losses_in_step(self) -> int:
        """How many a contender tells the stopwatch of."""
        return self.accumulation

    @abstractmethod
    def prepare(self, world_size: int) -> None:
        """Writes what the workers read, the same every time."""

    @abstractmethod
    def build_data_loader(self, worker: Worker) -> DataLoader:
        """
        This rank's data, in one epoch, so that nothing that belongs to the end of an epoch is
        timed. To be called after the process group is there, since AllenNLP's reader takes each
        rank's share by it.
        """

    @abstractmethod
    def build_model(self) -> Model:
        """The model, on the CPU, with the same weights every time."""

    def build_optimizer(self, model: torch.nn.Module) -> Optimizer:
        parameters = [[name, p] for name, p in model.named_parameters() if p.requires_grad]
        return Optimizer.from_params(Params(dict(self.optimizer)), model_parameters=parameters)

    def deepspeed_config(self, world_size: int) -> Dict[str, Any]:
        """DeepSpeed's configuration, complete, because Accelerate guesses wrong where it is not."""
        return {
            "train_micro_batch_size_per_gpu": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": self.batch_size * self.accumulation * world_size,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            # Its own default is to log the throughput every 10 steps.
            "steps_per_print": 2**31,
        }
