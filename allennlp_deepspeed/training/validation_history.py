from typing import Any, Callable, Dict, Optional, Tuple

from allennlp.common import Tqdm
from allennlp.data.data_loaders import MultiProcessDataLoader

from allennlp_deepspeed.engine.process.random_states import (
    random_states,
    set_random_states,
)
from allennlp_deepspeed.training.agreement import Exchange
from allennlp_deepspeed.training.even_batches import EvenBatches
from allennlp_deepspeed.training.progress import Progress


class ValidationHistory:
    """
    Restores the position in the validation data at a checkpoint by rereading the data of each
    earlier validation: with `batches_per_epoch` a loader continues where it stopped, and a reader
    may have a state. Data in memory that are read from the beginning each time have no position and
    aren't reread.

    # Parameters

    progress : `Progress`, required.
    data_loader : `Any`, required.
        The data loader of the validation data, or `None`.
    exchange : `Exchange`, required.
    shows_progress : `bool`, required.
        Whether AllenNLP's loop shows a progress bar on this rank, which reads the length of the
        loader.
    stop_if_signaled : `Callable[[str], None]`, required.
        Called between batches, with a description of the current phase, when the ranks have agreed
        on signals.
    """

    def __init__(
        self,
        progress: Progress,
        data_loader: Optional[Any],
        exchange: Exchange,
        shows_progress: bool,
        stop_if_signaled: Callable[[str], None],
    ) -> None:
        self._progress = progress
        self._data_loader = data_loader
        self._exchange = exchange
        self._shows_progress = shows_progress
        self._stop_if_signaled = stop_if_signaled
        # The random states at the start of each validation, by its epoch, and its step within the
        # epoch.
        self._starts: Dict[Tuple[int, Optional[int]], Dict[str, Any]] = {}
        self._start: Dict[str, Any] = {}

    def start(self) -> None:
        """Must be called before a validation reads its data."""
        if _has_position(self._data_loader):
            self._start = random_states()

    def finish(self, step: Optional[int]) -> None:
        """
        Records the validation that `start` has been called for.

        # Parameters

        step : `int`, required.
            The step within the epoch after which it was; `None` for that at the end of the epoch.
        """
        if _has_position(self._data_loader):
            self._starts[self._progress.epochs_completed, step] = self._start

    def forget(self, step: Optional[int]) -> None:
        """Forgets the validation, whose data are read again by a run that continues."""
        self._starts.pop((self._progress.epochs_completed, step), None)

    def fast_forward(self, step: Optional[int]) -> None:
        """
        Rereads the data of the validation after this step, if there was one. Every rank must call
        it after reading the training data of a step or, with `None`, of an epoch that isn't trained
        again. The random states remain.
        """
        start = self._starts.get((self._progress.epochs_completed, step))
        if start is None:
            return
        before = random_states()
        set_random_states(start)
        self._read()
        set_random_states(before)

    def _read(self) -> None:
        batches: Any = self._data_loader
        if self._shows_progress:
            batches = Tqdm.tqdm(batches, desc="fast-forwarding validation data")
        for _ in batches:
            # The same ranks stop at the same batch as in AllenNLP's loop.
            if self._exchange("signal", is_at_end=False)["is_at_end"]:
                return
            self._stop_if_signaled("while fast-forwarding to the checkpoint")
        self._exchange("signal", is_at_end=True)

    def state_dict(self) -> Dict[str, Any]:
        epochs, steps = zip(*self._starts) if self._starts else ((), ())
        return {
            "epochs": list(epochs),
            "steps": list(steps),
            "starts": list(self._starts.values()),
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        points = zip(state_dict["epochs"], state_dict["steps"])
        self._starts = dict(zip(points, state_dict["starts"]))


def _has_position(data_loader: Any) -> bool:
    if isinstance(data_loader, EvenBatches):
        data_loader = data_loader.data_loader
    return (
        type(data_loader) is not MultiProcessDataLoader
        or data_loader.batches_per_epoch is not None
        or data_loader.max_instances_in_memory is not None
        or not all(map(_is_from_allennlp, (data_loader.batch_sampler, data_loader.collate_fn)))
    )


def _is_from_allennlp(component: Any) -> bool:
    return component is None or type(component).__module__.startswith("allennlp.")
