import re
from typing import Any, List, Mapping, Optional, Sequence

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.gradients.reduction_schedule import STEP
from allennlp_deepspeed.reports.reading import StepFigures
from allennlp_deepspeed.reports.step_observer import StepObserver
from allennlp_deepspeed.training.batch_groups import micro_batch_size
from allennlp_deepspeed.training.engine_trainer import EngineTrainer


class ReportedTrainer(EngineTrainer):
    """
    Trainer with the properties that `RunReport` and the console read.
    """

    _observers: List[StepObserver]

    def _between_steps(self, is_first: bool = False) -> None:
        for observer in self._observers:
            if not self._progress.is_replaying:
                observer.between_steps(self._progress.total_batches_completed, is_first)

    @property
    def resolved_config(self) -> ResolvedConfig:
        """DeepSpeed's configuration, with nothing left to fill in."""
        return self._ddp_wrapped_model.config

    @property
    def checkpointer(self) -> Optional[DeepSpeedCheckpointer]:
        return self._checkpointer

    @property
    def schedule_name(self) -> Optional[str]:
        """Of the learning rate, `None` if there is none."""
        if self._learning_rate_scheduler is not None:
            return type(self._learning_rate_scheduler).__name__
        section = self.resolved_config.engine_config.get("scheduler") or {}
        return section.get("type")

    @property
    def peak_learning_rate(self) -> Optional[float]:
        """That a schedule warms up to, `None` if it isn't known."""
        scheduler = self._learning_rate_scheduler
        if scheduler is None:
            # Of DeepSpeed's, after which the optimizer's own is only what the schedule says.
            own = self.engine.lr_scheduler
            rates = getattr(own, "max_lrs", None) or getattr(own, "org_lrs", None)
        elif re.search("Warmup|PolynomialDecay|SlantedTriangular", type(scheduler).__name__):
            rates = [group.get("initial_lr", 0.0) for group in self.optimizer.param_groups]
        else:
            rates = None
        return max(rates) if rates else None

    @property
    def reduces_once_a_step(self) -> bool:
        """Whether `gradient_synchronization` says that gradients are reduced once a step."""
        return self._gradient_synchronization == STEP

    @property
    def has_fixed_batch_size(self) -> bool:
        """Whether each micro-batch has as many instances, but for the last."""
        return micro_batch_size(self.data_loader) is not None

    @property
    def best_epoch_metrics(self) -> Mapping[str, Any]:
        """Those of the validation of the best epoch so far."""
        return self._metric_tracker.best_epoch_metrics

    @property
    def hosts(self) -> Sequence[str]:
        """By rank."""
        return self._directories.hosts

    @property
    def num_epochs(self) -> int:
        """That are to be trained in all."""
        return self._num_epochs

    @property
    def num_readers(self) -> int:
        """The number of workers, or of groups that share sequences, which read different data."""
        return self._extensions.num_readers

    @property
    def epochs_completed(self) -> int:
        """The number of the epoch that the training is in, from 0."""
        return self._progress.epochs_completed

    @property
    def steps_completed_at_start(self) -> int:
        """Optimizer steps of all epochs, where it continues from; 0 where it begins anew."""
        return self._progress.total_batches_completed_at_start

    @property
    def epochs_completed_at_start(self) -> int:
        """Where it continues from; 0 where it begins anew."""
        return self._progress.start.epochs

    def figures_of_steps(self) -> StepFigures:
        """What the last optimizer steps have come to. Waits for the device."""
        return StepFigures(
            learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
            grad_norm=self._gradient_step.last_norm(),
            num_tokens=self._gradient_step.take_num_tokens(),
        )
