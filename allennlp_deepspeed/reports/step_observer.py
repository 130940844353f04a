from typing import Dict

from allennlp.training.callbacks import TrainerCallback


class StepObserver(TrainerCallback):
    """
    A callback that the trainer also tells of what AllenNLP has no method for. What it adds to the
    metrics in `on_epoch` would come too late for `metrics_epoch_N.json`.
    """

    def between_steps(self, num_steps: int, is_first: bool) -> None:
        """
        Called before the data of a step are asked for, and after the last step of an epoch.

        # Parameters

        num_steps : `int`, required.
            The optimizer steps of the run so far.
        is_first : `bool`, required.
            Whether it is the first call of an epoch.
        """

    def finish_epoch(self) -> Dict[str, float]:
        """Called after the last step of an epoch. Returns metrics of this rank."""
        return {}
