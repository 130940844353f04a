"""
What must not change during training, except by this package: the engine was constructed with it,
or has a copy. All of it is in one list, which is compared whenever the ranks agree, and before
weights are saved or replaced.
"""

import operator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Tuple, Type, Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.engine.lifecycle.loss_scaling import HOW_TO_STEP
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.training.agreement import Agreement
from allennlp_deepspeed.training.callbacks import needing_preparation
from allennlp_deepspeed.training.fixed_attributes import FIXED

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass
class Invariant:
    """
    What must not change, in values by their names. A name may go, but none may come.

    # Parameters

    name : `str`, required.
    read : `Callable[[], Dict[str, Any]]`, required.
        Returns the values, which are compared by `is` with those at construction.
    what : `str`, required.
        What has happened to a value that differs, with `{}` for its name.
    advice : `Union[str, Mapping[str, str]]`, required.
        What to write instead, or that for each name.
    error : `Type[Exception]`, optional (default = `RuntimeError`)
    """

    name: str
    read: Callable[[], Dict[str, Any]]
    what: str
    advice: Union[str, Mapping[str, str]]
    error: Type[Exception] = RuntimeError

    def __post_init__(self) -> None:
        self.right = self.read()

    def find_change(self) -> Optional[str]:
        """Returns the name of a value that has changed, or `None`."""
        now = self.read()
        are_right = list(map(operator.is_, now.values(), map(self.right.get, now)))
        return None if all(are_right) else list(now)[are_right.index(False)]


class Invariants:
    """
    Compares what must not change. It owns the entry "changes" of the ranks' record. An error says
    what has changed, the last global step at which it hadn't, and what to write.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
        With all attributes that must not change.
    agreement : `Agreement`, required.
    weight_change_detector : `WeightChangeDetector`, required.
    """

    def __init__(
        self, trainer: Any, agreement: Agreement, weight_change_detector: WeightChangeDetector
    ) -> None:
        self._by_name = {each.name: each for each in _all(trainer, weight_change_detector)}
        self._exchange, self._progress = agreement.exchange, trainer.progress
        self._weight_change_detector = weight_change_detector
        self._right_step = 0
        self._error: Optional[Exception] = None
        agreement.own("changes", self._has_changed, self._raise_if_any)

    def check(self, *names: str) -> None:
        """
        Compares some of them on this rank, where the next pass or the next step depends on them.

        # Raises

        `RuntimeError` or `ConfigurationError`
            If one has changed.
        """
        error = self._find_change(names)
        if error is not None:
            raise error

    def check_assignment(self, name: str, value: Any) -> None:
        """
        Checks that an attribute of the trainer may be set.

        # Raises

        `RuntimeError`
            If it is one that must not change. The trainer could use it before the ranks agree.
        """
        attributes = self._by_name["attributes"]
        if name in FIXED and attributes.right.get(name) is not value:
            raise self._describe(attributes, name)

    @contextmanager
    def explain_missing_attributes(self) -> Iterator[None]:
        """
        Context manager in which a missing attribute of a parameter that DeepSpeed needs raises the
        error of a parameter that was replaced.
        """
        try:
            yield
        except AttributeError as error:
            if (error.name or "").startswith("ds_"):
                self.check("parameters")
            raise

    def _has_changed(self) -> bool:
        # The steps are those of a full epoch.
        self._error = self._find_change(name for name in self._by_name if name != "steps")
        return self._error is not None

    def _raise_if_any(self, has_changed: bool) -> None:
        if has_changed:
            errors = self._exchange(errors=self._error)["errors"]
            raise next(error for error in errors if error is not None)
        if self._weight_change_detector.has_compared:
            self._weight_change_detector.has_compared = False
            self._right_step = self._progress.total_batches_completed

    def _find_change(self, names: Iterable[str]) -> Optional[Exception]:
        for name in names:
            changed = self._by_name[name].find_change()
            if changed is not None:
                return self._describe(self._by_name[name], changed)
        return None

    def _describe(self, invariant: Invariant, changed: str) -> Exception:
        advice, step = invariant.advice, self._right_step
        if not isinstance(advice, str):
            advice = f"{advice[changed][:1].upper()}{advice[changed][1:]}."
        since = f"after global step {step}" if step else "after the trainer was constructed"
        return invariant.error(f"{invariant.what.format(changed)} {since}. {advice}")


def _all(trainer: Any, detector: WeightChangeDetector) -> Tuple[Invariant, ...]:
    engine, progress, shards = trainer.engine, trainer.progress, trainer._ddp_wrapped_model.shards
    model, optimizer = engine.module, engine.basic_optimizer
    stage = engine.zero_optimization_stage()
    prepared = needing_preparation(trainer.callbacks)
    parameters_to_refuse = set() if shards.steps_parameters else shards.trained
    num_steps = engine.global_steps
    trained = dict(model.named_parameters())
    if shards.steps_parameters:
        # It skips those without a gradient.
        trained = {name: p for name, p in trained.items() if p not in shards.trained}
        how_to_freeze = (
            "The optimizer doesn't have it. Leave it trainable in 'trainer.no_grad' and in the "
            "model's constructor, and let the callback freeze it in `on_start`."
        )
    else:
        # Shards of flat tensors, each of which is updated as one. A callback may find these in
        # `param_groups`.
        for master, parameters in zip(shards.masters, shards.parameters_of_masters):
            if parameters:
                trained[f"{shards.name_of(parameters[0])} (master weights)"] = master
        how_to_freeze = (
            "DeepSpeed doesn't support that during training. Freeze it by 'trainer.no_grad', or "
            'write "deepspeed_config": {"zero_optimization": {"stage": 0}} without "bf16" and '
            '"fp16".'
        )
    tensors = list(trained.values())

    def requires_grad() -> Dict[str, Any]:
        with access_allowed():
            return dict(zip(trained, map(_REQUIRES_GRAD, tensors)))

    def added_callbacks() -> Dict[str, Any]:
        now = needing_preparation(trainer.callbacks)
        added = [each for each in now if not any(each is known for known in prepared)]
        return {type(each).__name__: each for each in added}

    def masters() -> Dict[str, Any]:
        groups = [] if shards.steps_parameters else optimizer.param_groups
        return {
            f"[{i}]['params'][{j}]": tensor
            for i, group in enumerate(groups)
            for j, tensor in enumerate(group["params"])
        }

    def lost_states() -> Dict[str, Any]:
        return {shards.name_of(key): key for key in optimizer.state if key in parameters_to_refuse}

    def passes_without_step() -> Dict[str, Any]:
        nonlocal num_steps
        num_passes, progress.num_forward_passes = progress.num_forward_passes, 0
        has_stepped, num_steps = engine.global_steps > num_steps, engine.global_steps
        return {} if has_stepped or num_passes == 0 else {str(num_passes): engine}

    return (
        Invariant(
            "callbacks",
            added_callbacks,
            "The callback {} calls backward or logs parameters, but it (or its 'on_backward') was "
            "added",
            "Pass it to the trainer's constructor, or write it in 'trainer.callbacks'.",
            ConfigurationError,
        ),
        Invariant(
            "attributes",
            lambda: {name: value for name, value in vars(trainer).items() if name in FIXED},
            "'{}' of a 'deepspeed' trainer was set, which the engine doesn't use,",
            FIXED,
        ),
        Invariant(
            "parameters",
            lambda: dict(model.named_parameters(remove_duplicate=False)) if stage else {},
            "The parameter '{}' was added or replaced",
            f"ZeRO stage {stage} neither updates nor saves it. Construct, replace and tie layers "
            "in the model's constructor. If the model replaces a tensor itself, make it a buffer "
            "(`register_buffer`).",
        ),
        Invariant(
            "requires_grad",
            requires_grad,
            "The parameter '{}' was frozen or unfrozen",
            how_to_freeze,
        ),
        Invariant(
            "param_groups",
            masters,
            "`trainer.optimizer.param_groups{}` was replaced",
            "The engine has constructed it. Change other settings of the groups, such as 'lr'.",
        ),
        Invariant(
            "optimizer_states",
            lost_states,
            "A state of the parameter '{}' was added to `trainer.optimizer.state`",
            "The keys are master weights, so that no step reads it. To change the state of a "
            "parameter in place, write `trainer.optimizer_state(parameter)`.",
        ),
        Invariant(
            "shared_attributes",
            lambda: detector.shared_attributes,
            "The attribute {} was set",
            "At ZeRO stage 3 the engine updates the parameter in other memory, so that the "
            "attribute would keep its values. In the forward pass, read the parameter itself "
            'instead of an attribute, or write "deepspeed_config": {"zero_optimization": {"stage": '
            "2}}.",
            ConfigurationError,
        ),
        Invariant(
            "weights",
            detector.pop_changed,
            "The parameter '{}' was changed outside the optimizer",
            "The optimizer updates master weights, and its next step would undo the change. Make "
            "it in a callback, within `with trainer.modified_weights():`, on every rank. In a "
            "forward pass, compute with a changed copy instead: `torch.clamp(weight, max=4.6)` for "
            "`weight.data.clamp_(max=4.6)`.",
        ),
        Invariant(
            "steps",
            passes_without_step,
            "The model was called with {} batches, but the engine made no step,",
            HOW_TO_STEP,
        ),
    )
