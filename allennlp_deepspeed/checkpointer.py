import logging
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any, List, Optional, Set, Tuple, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.trainer import TrainerCheckpoint
from overrides import overrides

if TYPE_CHECKING:
    from allennlp_deepspeed.trainer import DeepSpeedTrainer

logger = logging.getLogger(__name__)

_ENGINE_DIRECTORY = "engine"

PointInTime = Tuple[int, int]
"""Epochs completed, and optimizer steps completed in the epoch after them."""


@Checkpointer.register("deepspeed")
class DeepSpeedCheckpointer(Checkpointer):
    """
    Saves and prunes checkpoints of a `DeepSpeedTrainer`. Its methods are to be called by every
    rank; which ranks write what is decided in here, and every rank takes part in every collective.

    Registered as a `Checkpointer` with name "deepspeed", and the one that the "deepspeed" trainer
    uses if its `"checkpointer"` has no `"type"`. It takes the arguments of AllenNLP's
    [`Checkpointer`](https://docs.allennlp.org/main/api/training/checkpointer/) with the same
    meaning.

    A checkpoint is a directory `checkpoint_e{epochs}_b{steps}` in the serialization directory. In
    it are what DeepSpeed saves of the model and the optimizer, in DeepSpeed's own layout under the
    tag `engine`, and `training_state_w{rank}.th` for each rank. It is written under another name,
    and given this one when all ranks are done.

    # Parameters

    save_every_num_seconds : `float`, optional (default = `None`)
        As in AllenNLP, but in distributed training too: the clock of rank 0 decides for all ranks,
        which then agree once for each optimizer step.
    save_on_preemption : `bool`, optional (default = `False`)
        Whether a training that ends because of a SIGTERM first saves a checkpoint, after the
        optimizer step that it is in. Not on Ctrl-C.
    """

    default_implementation = "deepspeed"

    _directory_re = re.compile(r"checkpoint_e(\d+)_b(\d+)$")

    def __init__(
        self,
        serialization_dir: Union[str, os.PathLike],
        save_completed_epochs: bool = True,
        save_every_num_seconds: Optional[float] = None,
        save_every_num_batches: Optional[int] = None,
        keep_most_recent_by_count: Optional[int] = 2,
        keep_most_recent_by_age: Optional[int] = None,
        save_on_preemption: bool = False,
    ) -> None:
        super().__init__(
            serialization_dir,
            save_completed_epochs=save_completed_epochs,
            save_every_num_batches=save_every_num_batches,
            keep_most_recent_by_count=keep_most_recent_by_count,
            keep_most_recent_by_age=keep_most_recent_by_age,
        )
        # Not through the base class, which refuses it in distributed training.
        self._save_every_num_seconds = save_every_num_seconds
        self.save_on_preemption = save_on_preemption

    @overrides
    def maybe_save_checkpoint(  # type: ignore[override]
        self,
        trainer: "DeepSpeedTrainer",
        num_epochs_completed: int,
        num_batches_in_epoch_completed: int,
    ) -> bool:
        """
        Saves a checkpoint if it is time. To be called by every rank.

        # Returns

        `bool`
            Whether the model's weights can be copied from the checkpoint's model state file, which
            is what AllenNLP's trainer asks. Always `False`: DeepSpeed's files hold shards.
        """
        if self._is_time_to_save(num_epochs_completed, num_batches_in_epoch_completed):
            self.save_checkpoint(trainer)
        return False

    def maybe_save_on_preemption(
        self,
        trainer: "DeepSpeedTrainer",
        num_epochs_completed: int,
        num_batches_in_epoch_completed: int,
    ) -> None:
        """
        Saves a checkpoint before the training leaves, if it is to and the last one isn't of this
        very point in time. To be called by every rank.
        """
        last_save = (
            self._last_save_num_epochs_completed,
            self._last_save_num_batches_in_epoch_completed,
        )
        now = (num_epochs_completed, num_batches_in_epoch_completed)
        if self.save_on_preemption and now != last_save:
            self.save_checkpoint(trainer)

    def _is_time_to_save(self, num_epochs: int, num_batches_in_epoch: int) -> bool:
        last_save_num_batches = (
            self._last_save_num_batches_in_epoch_completed
            if num_epochs == self._last_save_num_epochs_completed
            else 0
        )
        is_time = num_batches_in_epoch == 0 and self._save_completed_epochs
        if self._save_every_num_batches is not None:
            is_time |= num_batches_in_epoch - last_save_num_batches >= self._save_every_num_batches
        if self._save_every_num_seconds is not None:
            elapsed = time.time() - self._last_save_time
            is_time |= _of_rank_0(elapsed >= self._save_every_num_seconds)
        return is_time

    @overrides
    def save_checkpoint(self, trainer: "DeepSpeedTrainer") -> None:  # type: ignore[override]
        """Saves a checkpoint and prunes the older ones. To be called by every rank."""
        trainer_state = trainer.get_checkpoint_state().trainer_state
        point_in_time = (
            trainer_state["epochs_completed"],
            trainer_state["batches_in_epoch_completed"],
        )
        self._last_save_time = time.time()
        (
            self._last_save_num_epochs_completed,
            self._last_save_num_batches_in_epoch_completed,
        ) = point_in_time

        directory = self._directory(point_in_time)
        unfinished = directory + ".unfinished"
        if self._is_primary:
            shutil.rmtree(unfinished, ignore_errors=True)
            os.makedirs(unfinished)
        dist.barrier()
        trainer.engine.save_checkpoint(unfinished, tag=_ENGINE_DIRECTORY)
        torch.save(trainer_state, self._trainer_state_path(unfinished))
        dist.barrier()
        if self._is_primary:
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(unfinished, directory)
            self._prune()
        dist.barrier()

    def _prune(self) -> None:
        """Removes the checkpoints that neither their count nor their age keeps."""
        if self._keep_most_recent_by_count is None and self._keep_most_recent_by_age is None:
            return
        checkpoints = sorted(self._find_all_checkpoints(), reverse=True)
        keep = set(checkpoints[: self._keep_most_recent_by_count or 0])
        if self._keep_most_recent_by_age is not None:
            oldest = time.time() - self._keep_most_recent_by_age
            keep.update(c for c in checkpoints if os.path.getmtime(self._directory(c)) >= oldest)
        for checkpoint in checkpoints:
            if checkpoint not in keep:
                self._remove_checkpoint(*checkpoint)

    @overrides
    def load_checkpoint(
        self, trainer: Optional["DeepSpeedTrainer"] = None
    ) -> Optional[TrainerCheckpoint]:
        """
        Loads the newest checkpoint that all ranks have: the model and the optimizer into the
        trainer's engine. To be called by every rank.

        # Returns

        `Optional[TrainerCheckpoint]`
            This rank's training state, with an empty model state; `None` if there is no checkpoint.

        # Raises

        `ConfigurationError`
            If the checkpoint is not of this configuration.
        """
        if trainer is None:
            raise ConfigurationError(
                "A DeepSpeedCheckpointer loads a checkpoint into the engine of a trainer: call "
                "load_checkpoint(trainer)."
            )
        checkpoint = self._newest_common_checkpoint()
        if checkpoint is None:
            return None
        directory = self._directory(checkpoint)
        logger.info("Continuing from the checkpoint in %s", directory)
        self._check_world_size(directory)
        if trainer.engine.zero_nvme_offload_optimizer():
            raise ConfigurationError(
                f"The training in {self._serialization_dir} can't be continued: DeepSpeed's "
                "checkpoints lack the optimizer states that are on NVMe. Start it anew, or with "
                "deepspeed_config.zero_optimization.offload_optimizer.device 'cpu'."
            )
        path, _ = trainer.engine.load_checkpoint(directory, tag=_ENGINE_DIRECTORY)
        if path is None:
            raise ConfigurationError(
                f"DeepSpeed finds no weights in {directory}. Remove it to continue from the "
                "checkpoint before it."
            )
        trainer_state = torch.load(
            self._trainer_state_path(directory), map_location="cpu", weights_only=False
        )
        (
            self._last_save_num_epochs_completed,
            self._last_save_num_batches_in_epoch_completed,
        ) = checkpoint
        return TrainerCheckpoint({}, trainer_state)

    def _check_world_size(self, directory: str) -> None:
        files = [n for n in os.listdir(directory) if n.startswith("training_state_w")]
        if len(files) != dist.get_world_size():
            raise ConfigurationError(
                f"The checkpoint in {directory} was written by {len(files)} workers, and there "
                f"are {dist.get_world_size()} now. Give 'distributed.cuda_devices' {len(files)} "
                "entries to continue from it."
            )

    def _newest_common_checkpoint(self) -> Optional[PointInTime]:
        """The ranks agree, because they may not see the same directory."""
        seen: List[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, sorted(self._find_all_checkpoints()))
        common = set.intersection(*({tuple(c) for c in checkpoints} for checkpoints in seen))
        if not common and any(seen):
            raise ConfigurationError(
                f"The workers see no checkpoint in common in {self._serialization_dir}: {seen}. "
                "All nodes need one serialization directory that they share."
            )
        return max(common, default=None)

    @overrides
    def find_latest_checkpoint(self) -> Optional[Tuple[str, str]]:
        """
        The directory of the newest checkpoint that this rank sees, and this rank's training state
        file in it; `None` if there is no checkpoint.
        """
        checkpoints = self._find_all_checkpoints()
        if not checkpoints:
            return None
        directory = self._directory(max(checkpoints))
        return directory, self._trainer_state_path(directory)

    @overrides
    def _find_all_checkpoints(self) -> Set[PointInTime]:
        matches = (self._directory_re.match(name) for name in os.listdir(self._serialization_dir))
        return {(int(match.group(1)), int(match.group(2))) for match in matches if match}

    @overrides
    def _remove_checkpoint(self, epochs_completed: int, batches_in_epoch_completed: int) -> None:
        shutil.rmtree(self._directory((epochs_completed, batches_in_epoch_completed)))

    def _directory(self, point_in_time: PointInTime) -> str:
        epochs, batches = point_in_time
        return os.path.join(self._serialization_dir, f"checkpoint_e{epochs}_b{batches}")

    def _trainer_state_path(self, directory: str) -> str:
        return os.path.join(directory, f"training_state_w{self._rank}.th")


DeepSpeedCheckpointer.register("deepspeed")(DeepSpeedCheckpointer)


def _of_rank_0(decision: bool) -> bool:
    decisions = [decision]
    dist.broadcast_object_list(decisions, src=0)
    return decisions[0]
