from typing import Any, Callable, Dict, List, Optional

import torch
from allennlp.common import Tqdm
from allennlp.data.data_loaders import MultiProcessDataLoader

from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.random_states import (
    random_states,
    set_random_states,
)
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
    device : `torch.device`, required.
        The device that the process group communicates on.
    shows_progress : `bool`, required.
        Whether AllenNLP's loop shows a progress bar on this rank, which reads the length of the
        loader.
    agree_on_interruption : `Callable[[str], None]`, required.
        Called between batches, with a description of the current phase.
    """

    def __init__(
        self,
        progress: Progress,
        data_loader: Optional[Any],
        device: torch.device,
        shows_progress: bool,
        agree_on_interruption: Callable[[str], None],
    ) -> None:
        self._progress = progress
        self._data_loader = data_loader
        self._device = device
        self._shows_progress = shows_progress
        self._agree_on_interruption = agree_on_interruption
        self._epochs: List[int] = []
        self._starts: List[Dict[str, Any]] = []

    def start(self) -> None:
        """
        Records the start of a validation. Must be called before the validation of an epoch reads
        its data.
        """
        if _has_position(self._data_loader):
            self._epochs.append(self._progress.epochs_completed)
            self._starts.append(random_states())

    def fast_forward(self) -> None:
        """
        Rereads the data of the epoch's validation, if there was one. Every rank must call it after
        reading the training data of an epoch that isn't trained again.
        """
        epoch = self._progress.epochs_completed
        if epoch not in self._epochs:
            return
        set_random_states(self._starts[self._epochs.index(epoch)])
        batches: Any = self._data_loader
        if self._shows_progress:
            batches = Tqdm.tqdm(batches, desc="fast-forwarding validation data")
        for _ in batches:
            # The same ranks stop at the same batch as in AllenNLP's loop.
            if collectives.all_reduce_any(False, self._device):
                return
            self._agree_on_interruption("while fast-forwarding to the checkpoint")
        collectives.all_reduce_any(True, self._device)

    def state_dict(self) -> Dict[str, Any]:
        return {"epochs": list(self._epochs), "starts": list(self._starts)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Restores the history without the epochs after the checkpoint, which are validated again.
        """
        start = self._progress.resume_point
        self._epochs = [epoch for epoch in state_dict["epochs"] if epoch < start.epochs]
        self._starts = state_dict["starts"][: len(self._epochs)]


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
