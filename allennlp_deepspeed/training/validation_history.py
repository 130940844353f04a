from typing import TYPE_CHECKING, Any, Dict, List

import torch
import torch.distributed as dist
from allennlp.common import Tqdm
from allennlp.data.data_loaders import MultiProcessDataLoader

from allennlp_deepspeed.processes.random_states import (
    RandomHistory,
    random_states,
    set_random_states,
)
from allennlp_deepspeed.training.even_batches import EvenBatches

if TYPE_CHECKING:
    from allennlp_deepspeed.training.trainer import DeepSpeedTrainer


class ValidationHistory:
    """
    Brings validation data to the place where they were at a checkpoint, by reading again what each
    validation before has read: with `batches_per_epoch` a loader goes on where it stopped, and a
    reader may have a state. Data in memory that are read from the beginning each time have no place
    and are left out.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    """

    def __init__(self, trainer: "DeepSpeedTrainer") -> None:
        self._trainer = trainer
        self._epochs: List[int] = []
        self._starts = RandomHistory()

    def start(self) -> None:
        """To be called before the validation of an epoch asks for its data."""
        if _may_keep_place(self._trainer._validation_data_loader):
            self._epochs.append(self._trainer._epochs_completed)
            self._starts.append(random_states())

    def read_again(self) -> None:
        """
        Reads what the validation of the epoch has read, if there was one. To be called by every
        rank, when the training data of an epoch have been read that isn't trained again.
        """
        trainer = self._trainer
        if trainer._epochs_completed not in self._epochs:
            return
        set_random_states(self._starts[self._epochs.index(trainer._epochs_completed)])
        batches: Any = trainer._validation_data_loader
        if trainer._primary:  # on which AllenNLP asks for the length
            batches = Tqdm.tqdm(batches, desc="reading validation data again")
        for _ in batches:
            # The same ranks stop at the same batch as in AllenNLP's loop.
            if self._is_any_done(False):
                return
            trainer._leave_if_interrupted("before it has caught up with the checkpoint")
        self._is_any_done(True)

    def _is_any_done(self, is_done: bool) -> bool:
        if dist.get_world_size() == 1:
            return is_done
        done = torch.tensor(int(is_done), dtype=torch.int32, device=self._trainer.cuda_device)
        dist.all_reduce(done)
        return bool(done.item())

    def state_dict(self) -> Dict[str, Any]:
        return {"epochs": list(self._epochs), "starts": self._starts.state_dict()}

    def load_state_dict(self, state_dict: Dict[str, Any], epochs_completed: int) -> None:
        """
        # Parameters

        state_dict : `Dict[str, Any]`, required.
        epochs_completed : `int`, required.
            Those after are validated again.
        """
        self._epochs = [epoch for epoch in state_dict["epochs"] if epoch < epochs_completed]
        self._starts = RandomHistory.from_state_dict(state_dict["starts"], len(self._epochs))


def _may_keep_place(data_loader: Any) -> bool:
    if isinstance(data_loader, EvenBatches):
        data_loader = data_loader.data_loader
    return (
        type(data_loader) is not MultiProcessDataLoader
        or data_loader.batches_per_epoch is not None
        or data_loader.max_instances_in_memory is not None
        or not all(map(_is_of_allennlp, (data_loader.batch_sampler, data_loader.collate_fn)))
    )


def _is_of_allennlp(component: Any) -> bool:
    return component is None or type(component).__module__.startswith("allennlp.")
