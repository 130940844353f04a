from typing import Any, List, Mapping, NamedTuple, Optional, Protocol, Sequence

import torch
from allennlp.training.callbacks import TrainerCallback
from deepspeed.runtime.engine import DeepSpeedEngine

from allennlp_deepspeed.config.settings import ResolvedConfig


class StepFigures(NamedTuple):
    """
    What the last optimizer steps have come to.

    # Parameters

    learning_rate : `float`
        The highest of all parameter groups.
    grad_norm : `Optional[float]`
        Of the last step before clipping, if anyone has computed it.
    num_tokens : `Optional[int]`
        That there was a loss of, on all ranks since the last call, if the model counts them.
    """

    learning_rate: float
    grad_norm: Optional[float]
    num_tokens: Optional[int]


class ReportedTraining(Protocol):
    """All that a report asks of a trainer."""

    cuda_device: torch.device
    optimizer: torch.optim.Optimizer

    @property
    def engine(self) -> DeepSpeedEngine:
        """Which is up."""

    @property
    def resolved_config(self) -> ResolvedConfig:
        """That of the engine."""

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """In the order in which they are called."""

    @property
    def checkpointer(self) -> Any:
        """`None` if nothing is saved."""

    @property
    def schedule_name(self) -> Optional[str]:
        """Of the learning rate, `None` if there is none."""

    @property
    def peak_learning_rate(self) -> Optional[float]:
        """That a schedule warms up to, `None` if it isn't known."""

    @property
    def held_share(self) -> float:
        """Of a gradient, that waits for the last micro-batch of a step."""

    @property
    def has_fixed_batch_size(self) -> bool:
        """Whether each micro-batch has as many instances, but for the last."""

    @property
    def best_epoch_metrics(self) -> Mapping[str, Any]:
        """Those of the validation of the best epoch so far."""

    @property
    def hosts(self) -> Sequence[str]:
        """By rank."""

    @property
    def num_epochs(self) -> int:
        """That are to be trained in all."""

    @property
    def num_readers(self) -> int:
        """The number of workers or groups that read different data."""

    @property
    def steps_completed(self) -> int:
        """Optimizer steps, of all epochs."""

    @property
    def epochs_completed(self) -> int:
        """The number of the epoch that the training is in."""

    @property
    def steps_completed_at_start(self) -> int:
        """Where it continues from; 0 where it begins anew."""

    @property
    def epochs_completed_at_start(self) -> int:
        """Where it continues from; 0 where it begins anew."""

    def figures_of_steps(self) -> StepFigures:
        """Waits for the device. To be called once a reading."""
