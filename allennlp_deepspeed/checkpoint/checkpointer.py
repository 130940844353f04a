import inspect
import logging
import os
import time
import uuid
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Type

import deepspeed
import torch
import torch.distributed as dist
from allennlp.common import Registrable
from allennlp.common.checks import ConfigurationError
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.trainer import TrainerCheckpoint
from typing_extensions import override

from allennlp_deepspeed import versions
from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint import (
    by_name,
    frozen_parameters,
    serialization,
    state_files,
    vocabulary_files,
)
from allennlp_deepspeed.checkpoint.background_commit import BackgroundCommit
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.schedule_unit import ScheduleUnit
from allennlp_deepspeed.checkpoint.selection import (
    check_model,
    check_version,
    find_newest_intact,
    parameter_shapes,
    refuse_allennlp_checkpoints,
)
from allennlp_deepspeed.checkpoint.staged_files import StagedFiles
from allennlp_deepspeed.checkpoint.trainer_protocol import TrainerProtocol, overridden
from allennlp_deepspeed.config.constructors import construct_from_fields
from allennlp_deepspeed.config.declared_keys import CHECKPOINTER_KEYS, CheckpointerArguments
from allennlp_deepspeed.engine.lifecycle import profiler_ranges
from allennlp_deepspeed.engine.optimizers.fused import keep_implementation
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.worker_failure import describe_full_disk
from allennlp_deepspeed.frozen_records import check_same

logger = logging.getLogger(__name__)

# Seconds that a failing rank waits for a checkpoint that has been saved but not committed.
_ABANDON_AFTER = 5.0

# Methods of AllenNLP's checkpointer that this one doesn't call.
_NOT_CALLED = (
    "find_latest_checkpoint",
    "_find_all_checkpoints",
    "_model_state_path",
    "_parse_model_state_path",
    "_parse_training_state_path",
    "_remove_checkpoint",
    "_training_state_path",
)

_OVERRIDABLE = "`maybe_save_checkpoint`, `save_checkpoint` or `load_checkpoint`"

# Attributes that only the constructor sets.
_FIXED = ("_rank", "_serialization_dir")

_ON_NVME = (
    "optimizer states are on NVMe, and DeepSpeed's checkpoints don't include all of them, so this "
    'training can\'t be resumed. To resume, write "cpu" for '
    "'trainer.deepspeed_config.zero_optimization.offload_optimizer.device'."
)


@Checkpointer.register("deepspeed")
class DeepSpeedCheckpointer(Checkpointer):
    """
    Saves, commits, prunes and loads checkpoints of a `DeepSpeedTrainer`. Its methods must be called
    on every rank. They decide which ranks write which files, and every rank takes part in every
    collective.

    Registered as a `Checkpointer` with name "deepspeed", and the default of the "deepspeed" trainer
    if its `"checkpointer"` has no `"type"`. It takes the arguments of AllenNLP's
    [`Checkpointer`](https://docs.allennlp.org/main/api/training/checkpointer/) with the same
    meaning.

    A checkpoint is a directory `checkpoint_e{epochs}_b{steps}` in the serialization directory. It
    contains for each rank `state_w{rank}.safetensors`, with its elements of the weights and
    optimizer states by the names of the parameters, and `training_state_w{rank}.th`; the best
    weights so far, `best.th`, as a hard link; and `commit.json`, with a checksum of every file. It
    is written under a temporary name, flushed to disk while training continues, and renamed once
    every rank has confirmed its files. Until then it isn't a checkpoint, and older ones remain.
    Training can be resumed with another number of workers, another ZeRO stage, and layers in
    another order.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.

    All others are the fields of [`CheckpointerArguments`](../config/declared_keys.py).
    """

    default_implementation = "deepspeed"

    @construct_from_fields(CheckpointerArguments, Checkpointer.__init__)
    def __init__(self, arguments: CheckpointerArguments) -> None:
        _check_overridden(type(self))
        super().__init__(
            arguments.serialization_dir,
            save_completed_epochs=arguments.save_completed_epochs,
            save_every_num_batches=arguments.save_every_num_batches,
            keep_most_recent_by_count=arguments.keep_most_recent_by_count,
            keep_most_recent_by_age=arguments.keep_most_recent_by_age,  # type: ignore[arg-type]
        )
        self.keys = {name: getattr(arguments, name) for name in CHECKPOINTER_KEYS}
        # Set here, because the base class refuses it in distributed training.
        self._save_every_num_seconds = arguments.save_every_num_seconds
        self._keep_best_by_count = arguments.keep_best_by_count
        # Of the checkpoints whose weights have been validated.
        self._scores: Mapping[PointInTime, float] = {}
        self._on_corrupt = arguments.on_corrupt
        self._exclude_frozen_parameters = arguments.exclude_frozen_parameters
        self._checksums_of_vocabulary: Optional[Dict[str, str]] = None
        self._files = StagedFiles(arguments.async_save)
        self._checkpoints = CheckpointDirectory(self._serialization_dir)
        self._commits: Optional[BackgroundCommit] = None
        # `True` with optimizer states on NVMe.
        self._saves_nothing = False
        self.save_on_preemption = arguments.save_on_preemption
        self.is_time = False
        """Whether the ranks have agreed that `save_every_num_seconds` have elapsed."""
        self.is_save_deferred = False
        """Whether `save_checkpoint` was called where training can't be resumed."""
        self.on_committed: Optional[Callable[[str, int, float, int, int], None]] = None
        """
        Called in a thread after a commit, with the checkpoint's path and size in bytes, the seconds
        that it took, and the completed epochs and optimizer steps of the run.
        """

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOT_CALLED or (name in _FIXED and vars(self).get(name, value) != value):
            raise AttributeError(
                f"'{name}' of a DeepSpeedCheckpointer can't be set after construction: pass it to "
                f"the constructor, or write a subclass that overrides {_OVERRIDABLE}."
            )
        super().__setattr__(name, value)

    @classmethod
    @override
    def list_available(cls) -> List[str]:
        """
        Lists the registered names, including those of subclasses that are registered as a
        `Checkpointer`.
        """
        registered = Registrable._registry[Checkpointer]
        others = [name for name, (kind, _) in registered.items() if issubclass(kind, cls)]
        return list(dict.fromkeys([*super().list_available(), *others]))

    @classmethod
    @override
    def resolve_class_name(cls, name: str) -> Any:
        if name in Registrable._registry[cls] or name not in cls.list_available():
            return super().resolve_class_name(name)
        return Checkpointer.resolve_class_name(name)

    @profiler_ranges.mark_phase(profiler_ranges.SAVING)
    @override
    def maybe_save_checkpoint(  # type: ignore[override]
        self,
        trainer: TrainerProtocol,
        num_epochs_completed: int,
        num_batches_in_epoch_completed: int,
    ) -> bool:
        """
        Saves a checkpoint if one is due, and returns whether it has. Must be called on every rank,
        with the same arguments. While it trains, the trainer replaces the result with `False`,
        because AllenNLP's loop would copy weights after a save.

        # Parameters

        trainer : `DeepSpeedTrainer`
        num_epochs_completed : `int`
        num_batches_in_epoch_completed : `int`
            The number of optimizer steps. 0 at the end of an epoch, where the ranks agree on the
            time in this method.
        """
        if self._commits is not None:
            self._commits.raise_error()
        if num_batches_in_epoch_completed == 0 and self._save_every_num_seconds is not None:
            self.is_time |= collectives.broadcast_object(self.is_time_to_save())
        point = (num_epochs_completed, num_batches_in_epoch_completed)
        is_due = self.is_time or self.is_save_deferred or self.is_step_to_save(*point)
        if is_due:
            self.save_checkpoint(trainer)
        return is_due

    def maybe_save_on_preemption(
        self,
        trainer: TrainerProtocol,
        num_epochs_completed: int,
        num_batches_in_epoch_completed: int,
    ) -> None:
        """
        Saves a checkpoint before a preempted training exits, if `save_on_preemption` is set and the
        last checkpoint is of an earlier point in time. Must be called on every rank.
        """
        now = PointInTime(num_epochs_completed, num_batches_in_epoch_completed)
        if self.save_on_preemption and now != self._last_save:
            self.save_checkpoint(trainer)

    @property
    def last_saved(self) -> Optional[str]:
        """Returns the name of the last checkpoint that was saved or loaded, `None` before."""
        point = self._last_save
        if point == PointInTime(0, 0):
            return None
        return os.path.basename(self._checkpoints.path(point))

    @property
    def keeps_best(self) -> bool:
        """Returns whether `keep_best_by_count` is set."""
        return self._keep_best_by_count is not None

    @property
    def saves(self) -> bool:
        """Returns whether checkpoints can be saved."""
        return not self._saves_nothing

    def save_before_exit(self, trainer: TrainerProtocol, point: PointInTime) -> None:
        """
        Saves a checkpoint before all ranks exit with an error, if the last is of an earlier point
        in time, and waits for it. Must be called on every rank.
        """
        if point != self._last_save:
            self.save_checkpoint(trainer)
        self.finish()

    def is_saved(self, point: PointInTime, is_preempted: bool) -> bool:
        """
        Returns whether a training that is stopped at this point in time, which it has just reached,
        leaves a checkpoint of it. The same on every rank.

        # Parameters

        point : `PointInTime`, required.
        is_preempted : `bool`, required.
            Whether `maybe_save_on_preemption` is going to be called.
        """
        if self._saves_nothing:
            return False
        return (is_preempted and self.save_on_preemption) or point == self._last_save

    def is_step_to_save(
        self, num_epochs_completed: int, num_batches_in_epoch_completed: int
    ) -> bool:
        """
        Returns whether a checkpoint is due after this number of steps. The same on every rank.
        """
        if self._saves_nothing:
            return False
        last_save_num_batches = (
            self._last_save_num_batches_in_epoch_completed
            if num_epochs_completed == self._last_save_num_epochs_completed
            else 0
        )
        is_step = num_batches_in_epoch_completed == 0 and self._save_completed_epochs
        if self._save_every_num_batches is not None:
            num_batches = num_batches_in_epoch_completed - last_save_num_batches
            is_step |= num_batches >= self._save_every_num_batches
        return is_step

    def is_time_to_save(self) -> bool:
        """Returns whether `save_every_num_seconds` have elapsed by this rank's clock."""
        if self._save_every_num_seconds is None:
            return False
        return time.time() - self._last_save_time >= self._save_every_num_seconds

    @override
    def save_checkpoint(self, trainer: TrainerProtocol) -> None:  # type: ignore[override]
        """
        Saves a checkpoint. It is committed, and older ones are pruned, in a background thread while
        training continues. Must be called on every rank. Where training can't be resumed, as in
        `on_epoch` of a callback, it is saved at the next point in time where it can.

        # Raises

        `NotANumberError`
            On every rank, if a loss, a gradient or a weight is NaN.
        `RuntimeError`
            On every rank, if weights have been changed where the change is lost.
        """
        if trainer.engine.zero_nvme_offload_optimizer():
            return  # the warning is in `load_checkpoint`
        if trainer.best_weights.are_loaded:
            logger.warning(
                "No checkpoint is saved after training, because the model has its best weights: "
                "save it in 'on_epoch' of the callback."
            )
            return
        if not trainer.is_resumable:
            if trainer.checkpointer is not self:
                raise RuntimeError(
                    "Training can't be resumed from within a validation, or before an epoch has "
                    "ended: call `trainer.checkpointer.save_checkpoint`, which saves then, or "
                    "save in 'on_batch'."
                )
            logger.info("The checkpoint is saved when the validation or the epoch has ended.")
            self.is_save_deferred = True
            return
        self._scores = trainer.validation_scores
        with trainer.weights_to_save():
            self._save(trainer)

    def _save(self, trainer: TrainerProtocol) -> None:
        """Saves the current weights and states. Must be called on every rank."""
        if self._commits is None:
            directories = trainer.directories
            self._commits = BackgroundCommit(
                self._checkpoints,
                dist.get_rank(),
                directories.groups,
                directories.hosts,
                collectives.timeout(trainer.engine.device),
            )
        self._commits.wait()
        trainer.save_best_weights()
        trainer.all_reduce_metrics()
        trainer_state = trainer.get_checkpoint_state().trainer_state
        progress = trainer_state["progress"]
        point = PointInTime(progress["epochs_completed"], progress["batches_in_epoch_completed"])
        self._last_save_time = time.time()
        self.is_time = self.is_save_deferred = False
        self._remember(point)

        unfinished = self._checkpoints.unfinished_path(point)
        record = self._record(point, trainer)
        excluded = frozen_parameters.frozen_names(trainer.model) if record.frozen else set()
        if trainer.directories.is_leader:
            self._checkpoints.create_unfinished(point)
            if trainer.best_weights.exist:
                trainer.best_weights.link_into(unfinished, excluded)
        dist.barrier()
        average = dict(trainer_state.get("moving_average", {}))
        shadows, shards = average.pop("shadows", {}), trainer.wrapped_model.shards
        state = by_name.collect(shards, trainer.directories.is_leader, shadows, excluded)
        trainer_state = {**trainer_state, state_files.ENGINE: state.rest}
        if average or shadows:
            trainer_state["moving_average"] = average
        rank = dist.get_rank()
        self._files.save_tensors(
            state.tensors, state.record, state_files.file_path(unfinished, rank)
        )
        self._files.save(trainer_state, self._checkpoints.training_state_path(unfinished, rank))
        self._commits.start(
            point,
            record,
            self._write_staged,
            on_committed=partial(
                self._finish_commit, point, record, progress["total_batches_completed"]
            ),
        )

    def _finish_commit(self, point: PointInTime, record: CommitRecord, num_steps: int) -> None:
        if self.on_committed is not None:
            num_bytes = sum(file.bytes for file in record.files.values())
            seconds = time.time() - self._last_save_time
            path = self._checkpoints.path(point)
            self.on_committed(path, num_bytes, seconds, point.epochs, num_steps)
        best = sorted(self._scores, key=lambda scored: (-self._scores[scored], scored))
        self._checkpoints.prune(
            point,
            self._keep_most_recent_by_count,
            self._keep_most_recent_by_age,
            best,
            self._keep_best_by_count or 0,
        )

    def _write_staged(self) -> List[str]:
        """
        Writes the staged states. Returns the paths of this rank's files, the training state last.
        """
        self._files.write_staged()
        paths = self._files.take_paths()
        classes = serialization.unsafe_classes_in(paths[-1])
        if classes:
            raise ConfigurationError(
                f"The training state contains {', '.join(classes)}, which can't be saved: "
                "checkpoints are loaded without running code. Metrics and callback states must be "
                "tensors, numbers, strings and containers of these."
            )
        return paths

    def _record(self, point: PointInTime, trainer: TrainerProtocol) -> CommitRecord:
        """Returns the commit record, without its files. Must be called on every rank."""
        frozen = {}
        if self._exclude_frozen_parameters:
            frozen = trainer.best_weights.frozen_records()
        return CommitRecord(
            epochs_completed=point.epochs,
            batches_in_epoch_completed=point.steps,
            world_size=dist.get_world_size(),
            zero_stage=trainer.engine.zero_optimization_stage(),
            parameters=parameter_shapes(trainer.wrapped_model.shards),
            versions={
                "allennlp-deepspeed": versions.own_version(),
                "deepspeed": deepspeed.__version__,
                "torch": torch.__version__,
            },
            frozen=frozen,
            id=collectives.broadcast_object(uuid.uuid4().hex),
            vocabulary=self._vocabulary(),
        )

    def _vocabulary(self) -> Dict[str, str]:
        # Computed once, because the vocabulary doesn't change.
        if self._checksums_of_vocabulary is None:
            self._checksums_of_vocabulary = vocabulary_files.checksums(self._serialization_dir)
        return self._checksums_of_vocabulary

    def _check_vocabulary(self, record: CommitRecord, path: str) -> None:
        """
        Refuses a checkpoint of another vocabulary, on every rank if any rank finds one. Must be
        called on every rank, because each may see another directory.
        """
        problem = vocabulary_files.difference(self._serialization_dir, record.vocabulary, path)
        problems = collectives.gather_problems(problem)
        if problems:
            raise CheckpointError("\n".join(problems))

    def check_state(self, trainer: TrainerProtocol) -> None:
        """
        Checks that the states to be saved can be loaded again.

        # Raises

        `ConfigurationError`
            If a state of the model or of a callback contains anything except plain data, or if a
            trained parameter was replaced at stage 0, where weights are loaded before callbacks.
        """
        if trainer.engine.zero_optimization_stage() == 0:
            _refuse_replaced(trainer)
        states = {
            f"'{name}' in the state_dict() of the model": value
            for name, value in trainer.model.state_dict(keep_vars=True).items()
            if not isinstance(value, torch.Tensor)
        }
        for callback in trainer.callbacks:
            states[f"The state_dict() of {type(callback).__name__}"] = callback.state_dict()
        for description, state in states.items():
            classes = serialization.unsafe_classes(state)
            if classes:
                raise ConfigurationError(
                    f"{description} contains {', '.join(classes)}, which can't be saved: "
                    "checkpoints are loaded without running code. Return tensors, numbers, "
                    "strings and containers of these, or call "
                    "torch.serialization.add_safe_globals where that class is defined."
                )

    def finish(self) -> None:
        """
        Waits until all saved checkpoints are committed. Must be called on every rank, after
        training.
        """
        if self._commits is not None:
            self._commits.wait()
            dist.barrier()  # the store through which the ranks confirm ends with rank 0

    def abandon(self) -> None:
        """
        Waits a few seconds for the last saved checkpoint to be committed. Not a collective: for a
        failing rank.
        """
        if self._commits is not None:
            try:
                self._commits.wait(_ABANDON_AFTER)
            except Exception as error:
                full_disk = describe_full_disk(error)
                if full_disk is None:
                    logger.exception("The last checkpoint was not committed.")
                else:
                    logger.error("The last checkpoint was not committed: %s", full_disk)

    @override
    def load_checkpoint(
        self, trainer: Optional[TrainerProtocol] = None
    ) -> Optional[TrainerCheckpoint]:
        """
        Loads the newest checkpoint that all ranks have: model and optimizer states into the
        trainer's engine. Must be called on every rank.

        # Returns

        `Optional[TrainerCheckpoint]`
            This rank's training state, with an empty model state; `None` if there is no checkpoint.

        # Raises

        `CheckpointError`
            On every rank, if the checkpoint is damaged, or not of this model and configuration.
        """
        if trainer is None:
            raise ConfigurationError(
                "DeepSpeedCheckpointer.load_checkpoint needs the trainer whose engine it loads "
                "into: call load_checkpoint(trainer)."
            )
        self._saves_nothing = trainer.engine.zero_nvme_offload_optimizer()
        found = find_newest_intact(self._checkpoints, trainer.directories, self._on_corrupt)
        if found is None:
            refuse_allennlp_checkpoints(self._serialization_dir)
            if self._saves_nothing:
                logger.warning("No checkpoints are saved: %s", _ON_NVME)
            return None
        if self._saves_nothing:
            path = self._checkpoints.path(found.point)
            raise CheckpointError(f"{path} could not be loaded: {_ON_NVME}")
        check_model(self._checkpoints.path(found.point), found.record, trainer)
        self._check_vocabulary(found.record, self._checkpoints.path(found.point))
        return self._load(trainer, found.point, found.record)

    def _load(
        self, trainer: TrainerProtocol, point: PointInTime, record: CommitRecord
    ) -> TrainerCheckpoint:
        """Loads a checkpoint whose files are intact."""
        path = self._checkpoints.path(point)
        if record.frozen:
            check_same(trainer.best_weights.frozen_records(), record.frozen, path)
        announce(logger, "Loading checkpoint %s", path)
        # With more workers than wrote it, several resume from the same training state.
        rank = dist.get_rank() % record.world_size
        trainer_state = serialization.load(self._checkpoints.training_state_path(path, rank))
        check_version(path, record, trainer_state)
        optimizer = trainer.engine.basic_optimizer
        with optimizer.register_load_state_dict_pre_hook(keep_implementation):
            self._load_engine(trainer, path, record, trainer_state)
        _warn_of_other_steps(trainer_state["instances_per_step"], trainer.instances_per_step())
        _convert_position(trainer_state, trainer.instances_per_step())
        steps = trainer_state["progress"]["batches_in_epoch_completed"]
        self._remember(PointInTime(point.epochs, steps))
        if trainer_state["best_weights"]["exist"]:
            trainer.best_weights.restore_from(path, is_incomplete=bool(record.frozen))
        return TrainerCheckpoint({}, trainer_state)

    def _load_engine(
        self,
        trainer: TrainerProtocol,
        path: str,
        record: CommitRecord,
        trainer_state: Dict[str, Any],
    ) -> None:
        """Loads the engine's states, and adds this rank's moving averages to the training state."""
        shards, rest = trainer.wrapped_model.shards, trainer_state.pop(state_files.ENGINE)
        saved, current = rest["names_of_groups"], shards.names_of_groups
        by_name.check_groups(path, saved, current)
        was, now = (
            (record.zero_stage, record.world_size, saved),
            (trainer.engine.zero_optimization_stage(), dist.get_world_size(), current),
        )
        if was != now:
            record.check_complete(path)
            attributes = {"optimizer": rest["optimizer"], **trainer_state.get("attributes", {})}
            by_name.refuse_tensors(path, attributes)
            announce(
                logger,
                "The checkpoint is of ZeRO stage %d with %d workers: loading it by name",
                *was[:2],
            )
        files = state_files.StateFiles(path, dist.get_rank())
        averages = by_name.load(
            shards, files, rest, record.frozen, has_averages="moving_average" in trainer_state
        )
        if averages:
            trainer_state["moving_average"]["shadows"] = averages

    @property
    def _last_save(self) -> PointInTime:
        return PointInTime(
            self._last_save_num_epochs_completed, self._last_save_num_batches_in_epoch_completed
        )

    def _remember(self, point: PointInTime) -> None:
        self._last_save_num_epochs_completed = point.epochs
        self._last_save_num_batches_in_epoch_completed = point.steps

    @override
    def find_latest_checkpoint(self) -> Optional[Tuple[str, str]]:
        """
        Returns the directory of the newest checkpoint that this rank sees, and this rank's training
        state file in it; `None` if there is no checkpoint.
        """
        checkpoints = self._checkpoints.list_checkpoints()
        if not checkpoints:
            return None
        path = self._checkpoints.path(checkpoints[0])
        return path, self._checkpoints.training_state_path(path, self._rank)


DeepSpeedCheckpointer.register("deepspeed")(DeepSpeedCheckpointer)


def _refuse_replaced(trainer: TrainerProtocol) -> None:
    shards = trainer.wrapped_model.shards
    now = dict(trainer.model.named_parameters(remove_duplicate=False))
    # In the order of the model, so that all ranks and runs name the same one.
    for parameter in (p for p in trainer.engine.param_names if p in shards.trained):
        name = shards.name_of(parameter)
        if parameter.requires_grad and now.get(name) not in trainer.engine.param_names:
            raise ConfigurationError(
                f"The parameter '{name}' was removed or replaced after the trainer was "
                "constructed, so the optimizer doesn't update what is saved, and the training "
                "can't be resumed: replace layers in the model's constructor, or write "
                "'trainer.checkpointer': null."
            )


def _warn_of_other_steps(before: int, now: int) -> None:
    if now != before and dist.get_rank() == 0:
        logger.warning(
            "The global batch size is %d now, and was %d before the checkpoint; the learning rate "
            "may need to change. To keep the global batch size with another number of workers, "
            "change 'trainer.num_gradient_accumulation_steps' or 'data_loader.batch_size' too.",
            now,
            before,
        )


def _check_overridden(checkpointer_class: Type[DeepSpeedCheckpointer]) -> None:
    """
    Refuses subclasses whose overrides would have no effect.

    # Raises

    `ConfigurationError`
        If a subclass overrides a method that isn't called, or `load_checkpoint` without its
        argument.
    """
    name = checkpointer_class.__name__
    for method in overridden(DeepSpeedCheckpointer, checkpointer_class, _NOT_CALLED):
        raise ConfigurationError(
            f"{name} overrides '{method}', which DeepSpeedCheckpointer doesn't call: it loads the "
            f"newest intact checkpoint directory. Override {_OVERRIDABLE}, or delete the "
            "checkpoints that it must not load."
        )
    try:
        inspect.signature(checkpointer_class.load_checkpoint).bind("self", "trainer")
    except TypeError:
        raise ConfigurationError(
            f"'load_checkpoint' of {name} has no argument for the trainer: write `def "
            "load_checkpoint(self, trainer=None)`, and call `super().load_checkpoint(trainer)`."
        ) from None


def _convert_position(trainer_state: Dict[str, Any], instances_per_step: int) -> None:
    """Converts the numbers of completed steps if the number of instances per step has changed."""
    instances_before = trainer_state["instances_per_step"]
    if instances_per_step == instances_before:
        return

    def converted(num_steps: int) -> int:
        # Rounded down, so that no instance is skipped.
        return num_steps * instances_before // instances_per_step

    progress = trainer_state["progress"]
    total, unit = progress["total_batches_completed"], progress["schedule_unit"]
    progress["schedule_unit"] = ScheduleUnit(
        instances=unit[0] if unit else instances_before,
        instances_now=instances_per_step,
        num_before=ScheduleUnit(*unit).steps(total) if unit else total,
        global_step=total,
    )
    before = progress["batches_in_epoch_completed"]
    now = progress["batches_in_epoch_completed"] = converted(before)
    epochs, steps = progress["validated_point"]
    # Where another step is rounded to this one, it wasn't validated.
    is_validated = steps == before or converted(steps) != now
    progress["validated_point"] = [epochs, converted(steps)] if is_validated else [0, 0]
    if now != before:
        # Read by `Progress`, and by `ResumeState` if the checkpoint was saved in a validation.
        progress["is_converted"] = True
        trainer_state["resume_state"].pop("train_metrics", None)  # some steps may be trained again
