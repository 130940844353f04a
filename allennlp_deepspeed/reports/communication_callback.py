from typing import Any, Dict, List, Optional

from allennlp.common.checks import ConfigurationError
from allennlp.data import TensorDict
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.callbacks.log_writer import LogWriterCallback
from overrides import overrides

from allennlp_deepspeed.reports.communication import CommunicationCounter, Traffic
from allennlp_deepspeed.reports.step_observer import StepObserver


@TrainerCallback.register("deepspeed_communication")
class CommunicationCallback(StepObserver):
    """
    Counts what crosses the network in training: the calls and the bytes of each collective, as
    `CommunicationCounter` does.

    Registered as a `TrainerCallback` with name "deepspeed_communication":

    ```jsonnet
    "callbacks": ["deepspeed_communication", "tensorboard"]
    ```

    The training metrics of each epoch get, for each collective, here for `all_reduce`:

    - `training_communication_all_reduce_bytes` and `training_communication_all_reduce_calls`: their
      sums over the epoch;
    - `training_communication_all_reduce_bytes_per_step` and `..._calls_per_step`: these divided by
      the number of optimizer steps.

    `LogWriterCallback`s such as "tensorboard" and "wandb" write these too, and those of single
    steps, as `batch_communication_all_reduce_bytes` and `..._calls`. They may come before or after
    this callback in the list.

    Each rank counts what passes through it, and the primary's is what is shown. It counts optimizer
    steps only: from before the first forward pass of a step to after the collectives in which the
    ranks agree on its loss and the model its metrics. Validation, saving, the sums at the end of an
    epoch and the construction of the engine aren't in it. It makes no collective and waits for no
    device.

    # Parameters

    serialization_dir : `str`
        Passed in by the trainer.
    summary_interval : `int`, optional (default = `100`)
        After every how many steps their values are written to TensorBoard.

    # Raises

    `ConfigurationError`
        If `summary_interval` isn't a positive integer; when training starts, if the trainer isn't
        the "deepspeed" one, or PyTorch is too old to count.
    """

    reads_metrics = False

    def __init__(self, serialization_dir: str, summary_interval: int = 100) -> None:
        super().__init__(serialization_dir)
        if type(summary_interval) is not int or summary_interval < 1:
            raise ConfigurationError(
                f"'summary_interval' of the callback 'deepspeed_communication' is "
                f"{summary_interval}: must be a number of optimizer steps, at least 1."
            )
        self._summary_interval = summary_interval
        self._counter = CommunicationCounter()
        self._log_writers: List[LogWriterCallback] = []
        # Of the epoch. A collective that it hasn't called, but one before it, is there with zeros.
        self._steps = 0
        self._sums: Dict[str, Traffic] = {}

    @overrides
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary=is_primary, **kwargs)
        if not hasattr(trainer, "engine"):
            raise ConfigurationError(
                "The callback 'deepspeed_communication' needs the 'deepspeed' trainer: write "
                '"type": "deepspeed" in the trainer, or leave out the callback.'
            )
        self._log_writers = [c for c in trainer.callbacks if isinstance(c, LogWriterCallback)]

    @overrides
    def on_step_start(self) -> None:
        self._counter.start()

    @overrides
    def on_batch(
        self,
        trainer: Any,
        batch_inputs: List[TensorDict],
        batch_outputs: List[Dict[str, Any]],
        batch_metrics: Dict[str, Any],
        epoch: int,
        batch_number: int,
        is_training: bool,
        is_primary: bool = True,
        batch_grad_norm: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        if not is_training:
            return
        self._counter.stop()
        traffic = self._counter.read(reset=True)
        self._steps += 1
        for name, (calls, num_bytes) in traffic.items():
            sums = self._sums.get(name, Traffic(0, 0))
            self._sums[name] = Traffic(sums.calls + calls, sums.bytes + num_bytes)
        if is_primary and trainer.steps_completed % self._summary_interval == 0:
            for log_writer in self._log_writers:
                log_writer.log_scalars(
                    {f"batch_{key}": value for key, value in _scalars(traffic).items()},
                    log_prefix="train",
                )

    @property
    def bytes_per_step(self) -> Optional[float]:
        """Of this rank, in the steps of the epoch so far; `None` before the first."""
        if self._steps == 0:
            return None
        return sum(traffic.bytes for traffic in self._sums.values()) / self._steps

    @overrides
    def finish_epoch(self) -> Dict[str, float]:
        """Returns the metrics of this rank, and begins again with nothing."""
        metrics = _scalars(self._sums)
        if self._steps > 0:
            metrics.update({f"{key}_per_step": metrics[key] / self._steps for key in list(metrics)})
        self._steps = 0
        self._sums = {name: Traffic(0, 0) for name in self._sums}
        return metrics

    @overrides
    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._counter.stop()

    @overrides
    def state_dict(self) -> Dict[str, Any]:
        return {
            "steps": self._steps,
            "sums": {name: list(traffic) for name, traffic in self._sums.items()},
        }

    @overrides
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        self._sums = {name: Traffic(*counts) for name, counts in state_dict["sums"].items()}


def _scalars(traffic: Dict[str, Traffic]) -> Dict[str, float]:
    return {
        f"communication_{name}_{unit}": value
        for name, counts in traffic.items()
        for unit, value in counts._asdict().items()
    }
