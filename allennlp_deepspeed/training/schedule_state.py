import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import torch
from allennlp.training.learning_rate_schedulers.learning_rate_scheduler import (
    _PyTorchLearningRateSchedulerWithMetricsWrapper,
)
from allennlp.training.scheduler import Scheduler

from allennlp_deepspeed.checkpoint.trainer_protocol import Stateful

logger = logging.getLogger(__name__)

# Attributes that AllenNLP's schedules compute from "num_epochs" and the data.
_LENGTHS_IN_STEPS = {"total_steps", "num_steps_per_epoch"}
_LENGTHS = {*_LENGTHS_IN_STEPS, "num_epochs"}

# The entry of a `state_dict` with the states of the schedulers in a scheduler, by their paths.
_INNER = "inner schedules"


class ScheduleState:
    """
    State of a scheduler with inner ones among its attributes, which may refer to each other.
    AllenNLP's `state_dict` contains these as objects, which checkpoints can't contain, so they are
    saved by their own `state_dict`.

    # Parameters

    schedule : `Scheduler`, required.
    """

    def __init__(self, schedule: Scheduler) -> None:
        self.schedule = schedule

    def state_dict(self) -> Dict[str, Any]:
        inner = self._inner_schedules()
        state, *states = map(_plain_state, (self.schedule, *inner.values()))
        return {**state, _INNER: dict(zip(inner, states))}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        states = state_dict.get(_INNER, {})
        for path, schedule in self._inner_schedules().items():
            if path in states:
                schedule.load_state_dict(states[path])
        state = {key: value for key, value in state_dict.items() if key != _INNER}
        self.schedule.load_state_dict(state)

    def _inner_schedules(self) -> Dict[str, Any]:
        """Returns the inner schedules by path, each once."""
        inner: Dict[str, Any] = {}
        seen, remaining = {id(self.schedule)}, [("", self.schedule)]
        while remaining:
            prefix, owner = remaining.pop()
            for name, schedule in _attributes(owner):
                if id(schedule) not in seen:
                    seen.add(id(schedule))
                    inner[f"{prefix}{name}"] = schedule
                    remaining.append((f"{prefix}{name}.", schedule))
        return inner


@contextmanager
def keep_group_values(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """
    Context manager that restores the learning rates, momenta and other values of parameter groups.
    When AllenNLP's "combined" is loaded, it constructs its current scheduler, which sets the
    learning rates of its first epoch.
    """
    groups = optimizer.param_groups
    values = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    yield
    for group, value in zip(groups, values):
        group.update(value)


def start_plateau(schedule: Optional[Scheduler], score: Optional[float]) -> None:
    """
    Has a schedule that follows validations ("reduce_on_plateau") compare the next ones with the
    best score of a metric that it hasn't followed before.
    """
    plateau = getattr(schedule, "lr_scheduler", None)
    if score is not None and isinstance(plateau, torch.optim.lr_scheduler.ReduceLROnPlateau):
        plateau.best, plateau.num_bad_epochs = score, 0


def state_of(schedule: Optional[Scheduler]) -> Optional[Stateful]:
    if schedule is None or not has_inner_schedules(schedule):
        return schedule
    return ScheduleState(schedule)


def schedule_of(part: Stateful) -> Any:
    return part.schedule if isinstance(part, ScheduleState) else part


def length_of(part: Stateful, unit: Optional[Sequence[int]]) -> Dict[str, Any]:
    """
    Returns the length of a schedule that ends with the training, in the steps that it counts: those
    of a `ScheduleUnit`, if there is one.
    """
    part = schedule_of(part)
    if not isinstance(part, Scheduler):
        return {}
    # A run that is resumed with more epochs uses the schedule of the new number, and not that of
    # the former, which has ended.
    lengths = {name: value for name, value in vars(part).items() if name in _LENGTHS}
    for name in _LENGTHS_IN_STEPS & lengths.keys():
        if unit is not None and lengths[name] is not None:
            instances, instances_now, *_ = unit
            lengths[name] = round(lengths[name] * instances_now / instances)
    return lengths


@contextmanager
def warn_of_former_lengths(name: str, part: Stateful) -> Iterator[None]:
    """
    Context manager in which a schedule is loaded in a run with another `num_epochs`. Warns of
    attributes that the constructor may have computed from it, and that are those of the checkpoint.
    """
    constructed = _whole_numbers(part)
    yield
    # Counters start at -1, 0 or 1.
    former = [
        attribute
        for attribute, value in _whole_numbers(part).items()
        if attribute not in _LENGTHS and constructed.get(attribute, value) not in (-1, 0, 1, value)
    ]
    if former:
        logger.warning(
            "'trainer.num_epochs' has changed, but 'trainer.%s' continues with %s of the "
            "checkpoint. If its length is to follow, override `load_state_dict` in its class, "
            "so that it doesn't load these.",
            name,
            ", ".join(f"'{attribute}'" for attribute in former),
        )


def _whole_numbers(part: Stateful) -> Dict[str, int]:
    """Returns the public attributes of a schedule and its inner ones that are whole numbers."""
    schedule = schedule_of(part)
    if not isinstance(schedule, Scheduler):
        return {}
    owners = {"": schedule, "lr_scheduler.": getattr(schedule, "lr_scheduler", None)}
    if isinstance(part, ScheduleState):
        owners.update({f"{path}.": inner for path, inner in part._inner_schedules().items()})
    return {
        f"{prefix}{name}": value
        for prefix, owner in owners.items()
        for name, value in getattr(owner, "__dict__", {}).items()
        if type(value) is int and not name.startswith("_")
    }


def step_by_validation(schedule: Optional[Scheduler], score: float) -> None:
    """
    Steps a schedule that follows the validation, such as "reduce_on_plateau", after a validation
    within an epoch. Others count epochs.
    """
    schedule = getattr(schedule, "current_scheduler", schedule)  # of "combined"
    if isinstance(schedule, _PyTorchLearningRateSchedulerWithMetricsWrapper):
        schedule.step(score)


def has_inner_schedules(schedule: Any) -> bool:
    """Returns whether a scheduler needs a `ScheduleState`."""
    return any(True for _ in _attributes(schedule))


def _attributes(owner: Any) -> Iterator[Tuple[str, Any]]:
    """
    Yields the inner schedules in attributes of a scheduler, unless its class has a `state_dict` of
    its own.
    """
    if not isinstance(owner, Scheduler) or type(owner).state_dict is not Scheduler.state_dict:
        return
    for name, value in vars(owner).items():
        if isinstance(value, dict):
            items = [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            items = [(f"{name}.{i}", item) for i, item in enumerate(value)]
        else:
            items = [(name, value)]
        for path, item in items:
            if _is_inner_schedule(item):
                yield path, item


def _is_inner_schedule(value: Any) -> bool:
    is_stateful = all(hasattr(value, name) for name in ("state_dict", "load_state_dict"))
    return is_stateful and not isinstance(value, (type, torch.optim.Optimizer))


def _plain_state(schedule: Any) -> Dict[str, Any]:
    """Returns the `state_dict` of a schedule without the attributes that have inner schedules."""
    without = {path.partition(".")[0] for path, _ in _attributes(schedule)}
    return {key: value for key, value in schedule.state_dict().items() if key not in without}
