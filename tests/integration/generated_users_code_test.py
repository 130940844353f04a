"""
Users' code, generated: each method and attribute of AllenNLP's trainer, checkpointer, callback and
model is overridden, set, called or read in each phase of a training. What comes out is that of
`gradient_descent`, or a refusal that names it.
"""

import functools
import gc
import inspect
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Type

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from allennlp.nn.parallel import TorchDdpAccelerator
from allennlp.nn.regularizers import L2Regularizer
from allennlp.training import Checkpointer, GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import ExponentialLearningRateScheduler
from allennlp.training.metric_tracker import MetricTracker
from allennlp.training.metrics import CategoricalAccuracy
from allennlp.training.momentum_schedulers import InvertedTriangular
from allennlp.training.moving_average import ExponentialMovingAverage
from allennlp.training.trainer import Trainer

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.engine.process.process_environment import process_environment
from tests.support.side_by_side import CPU, Batch, Batches

_IN_TRAINING = ("start", "step", "validation", "epoch")
PHASES = (*_IN_TRAINING, "end")
Act = Callable[[Any], Any]
# How a number is named in metrics that depend on the machine.
_OF_MACHINE = ("duration", "memory")
# What refusals say that have no name in them.
_SAID = {"load_state_dict": "outside the optimizer", "train": "trains once"}
# In the names of checkpoints.
_POINT = re.compile(r"e\d+_b\d+")


@pytest.fixture(scope="module", autouse=True)
def one_process_group() -> Iterator[None]:
    """For all trainings, and without what is there before, which each engine's end would visit."""
    gc.collect()
    gc.freeze()
    with process_environment(CPU, 0):
        yield
    gc.unfreeze()


def penalty(alpha: float) -> RegularizerApplicator:
    return RegularizerApplicator([("head", L2Regularizer(alpha))])


class Net(Model):
    """A classifier with a buffer and a penalty."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(), penalty(0.02))
        self.layer = torch.nn.Linear(4, 3)
        self.head = torch.nn.Linear(3, 3)
        self.accuracy = CategoricalAccuracy()
        self.register_buffer("scale", torch.ones(1))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, label: torch.Tensor
    ) -> Dict[str, torch.Tensor]:
        logits = self.head(self.layer(x).tanh()) * self.scale
        self.accuracy(logits, label)
        return {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits, label)}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset)}


def batches(seed: int) -> List[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.rand(4, 4, generator=generator),
            "label": torch.randint(3, (4,), generator=generator),
        }
        for _ in range(3)
    ]


class Outcome:
    """What has become of a training: an error, or numbers by name."""

    def __init__(self, train: Callable[[], Dict[str, Any]]) -> None:
        self.error: Optional[BaseException] = None
        self.numbers: Dict[str, Any] = {}
        try:
            self.numbers = train()
        except (Exception, RecursionError) as error:
            self.error = error

    def assert_as(self, expected: "Outcome", name: str, what: str) -> None:
        if self.error is not None:
            pattern = _SAID.get(name, rf"['`]{name}['`]|\b{name}\(")
            is_named = re.search(pattern, str(self.error)) is not None
            assert is_named or expected.error is not None, f"{what}: {self.error!r}"
            return
        assert expected.error is None, f"{what}: trained, and not by gradient_descent"
        differences = [
            f"{what}: {key} is {value} and not {expected.numbers.get(key)}"
            for key, value in self.numbers.items()
            if not is_same(value, expected.numbers.get(key))
        ]
        assert not differences, "\n".join(differences[:3])
        assert self.numbers.keys() == expected.numbers.keys(), what


def is_same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, float) and isinstance(expected, float):
        return bool(actual == pytest.approx(expected, rel=1e-4, abs=1e-5))
    return bool(actual == expected)


class Attack(TrainerCallback):
    """
    Acts in one phase of a training, once or whenever it comes, and keeps what is returned.
    """

    def __init__(self, phase: Optional[str], act: Act, once: bool = True) -> None:
        super().__init__("")
        self.phase, self.act, self.once = phase, act, once
        self.returned: List[Any] = []
        self.calls: Counter[str] = Counter()

    def meet(self, phase: str, trainer: Any) -> None:
        if self.phase in (None, phase) and not (self.once and self.returned):
            self.returned.append(None)
            self.returned[-1] = plain(self.act(trainer))

    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        self.meet("start", trainer)

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        self.meet("step" if is_training else "validation", trainer)

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.meet("epoch", trainer)

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.meet("end", trainer)


class AttackInBackward(Attack):
    def on_backward(self, trainer: Any, *args: Any, **kwargs: Any) -> bool:
        self.meet("backward", trainer)
        return False


def plain(value: Any) -> Any:
    """Numbers and texts of a value, `None` for everything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().reshape(-1).tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return Path(value).name
    return value if isinstance(value, (bool, int, float)) else None


def best_weights(trainer: Any) -> Any:
    """Those of which the archive is made."""
    path = trainer.get_best_weights_path()
    is_there = path is not None and Path(path).exists()
    return plain(torch.load(path, weights_only=True)) if is_there else None


def flat(value: Any, name: str = "") -> Dict[str, Any]:
    """By the path of each."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}


def construct(
    trainer_class: Type[GradientDescentTrainer],
    directory: Path,
    callback: Optional[TrainerCallback] = None,
    stage: int = 2,
    model_class: Type[Model] = Net,
    checkpointer_class: Optional[Type[Checkpointer]] = None,
) -> Any:
    torch.manual_seed(3)
    model = model_class()
    is_own = issubclass(trainer_class, DeepSpeedTrainer)
    checkpointer_class = checkpointer_class or (DeepSpeedCheckpointer if is_own else Checkpointer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    trainer: Any = trainer_class(
        model=model,
        optimizer=optimizer,
        data_loader=Batches(batches(1)),
        validation_data_loader=Batches(batches(2)[:2]),
        validation_metric="+accuracy",
        num_epochs=2,
        cuda_device=-1,
        serialization_dir=directory,
        checkpointer=checkpointer_class(directory, keep_most_recent_by_count=None),
        learning_rate_scheduler=ExponentialLearningRateScheduler(optimizer, gamma=0.9),
        callbacks=[] if callback is None else [callback],
        enable_default_callbacks=False,
        run_confidence_checks=False,
        **({"deepspeed_config": {"zero_optimization": {"stage": stage}}} if is_own else {}),
    )
    return trainer


def train(directory: Path, trainer_class: Any, make: Callable[[], Attack], stage: int) -> Outcome:
    """With the callback that `make` returns."""

    def numbers() -> Dict[str, Any]:
        callback = make()
        trainer = construct(trainer_class, directory, callback, stage)
        metrics = trainer.train()
        metrics = {k: v for k, v in metrics.items() if not any(part in k for part in _OF_MACHINE)}
        values = {
            "metrics": metrics,
            "weights": plain(trainer.model.state_dict()),
            "best": best_weights(trainer),
            "returned": callback.returned,
            "calls": dict(callback.calls),
            # What is asked for after the last step of an epoch is saved at its end here, from where
            # training can be resumed.
            "saved": sorted(
                {m[0] for m in map(_POINT.search, map(str, directory.iterdir())) if m}
                - {f"e{epoch}_b3" for epoch in range(2)}
            ),
        }
        return flat(values)

    directory.mkdir(parents=True)
    return Outcome(numbers)


def compare(directory: Path, name: str, make: Callable[[], Attack], stage: int, what: str) -> None:
    expected = train(directory / "expected/out", GradientDescentTrainer, make, stage)
    actual = train(directory / "actual/out", DeepSpeedTrainer, make, stage)
    actual.assert_as(expected, name, f"{what} at stage {stage}")


def in_each_phase(
    directory: Path, name: str, act: Act, phases: Any = PHASES, stages: Any = (0, 2)
) -> None:
    """At stages 0 and 2 by turns, without the phases of those that aren't in `stages`."""
    failures = []
    for i, phase in enumerate(phases):
        stage = 2 * ((i + len(name)) % 2)
        if stage not in stages:
            continue
        kind = AttackInBackward if phase == "backward" else Attack
        of_phase = directory / phase
        of_phase.mkdir()
        make = functools.partial(kind, phase, act)
        try:
            compare(of_phase, name, make, stage, f"{name} in {phase}")
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, "\n".join(failures)


# The phases at stage 0 are left to `pytest -m soak`, for their time.
each_stage = pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.soak)])


# Set


class Halving(TrainerCallback):
    """Is added to those of the trainer."""

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 2 if is_training else 1


def other_optimizer(trainer: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.01)


OTHER_VALUES: Dict[str, Dict[str, Act]] = {
    "trainer": {
        "cuda_device": lambda trainer: torch.device("meta"),
        "data_loader": lambda trainer: Batches(batches(5)),
        "model": lambda trainer: Net(),
        "optimizer": other_optimizer,
        "_batches_in_epoch_completed": lambda trainer: 1,
        "_callbacks": lambda trainer: [*trainer._callbacks, Halving("")],
        "_checkpointer": lambda trainer: None,
        "_ddp_wrapped_model": lambda trainer: object(),
        "_distributed": lambda trainer: True,
        "_epochs_completed": lambda trainer: 5,
        "_grad_clipping": lambda trainer: 0.001,
        "_grad_norm": lambda trainer: 0.01,
        "_learning_rate_scheduler": lambda trainer: ExponentialLearningRateScheduler(
            trainer.optimizer, gamma=0.1
        ),
        "_metric_tracker": lambda trainer: MetricTracker("-accuracy", patience=1),
        "_momentum_scheduler": lambda trainer: InvertedTriangular(trainer.optimizer, 1, 1),
        "_moving_average": lambda trainer: ExponentialMovingAverage(
            trainer.model.named_parameters(), decay=0.5
        ),
        "_num_epochs": lambda trainer: 1,
        "_num_gradient_accumulation_steps": lambda trainer: 2,
        "_primary": lambda trainer: False,
        "_rank": lambda trainer: 1,
        "_scaler": lambda trainer: torch.amp.GradScaler("cpu"),
        "_serialization_dir": lambda trainer: str(Path(trainer._serialization_dir) / "other"),
        "_should_validate_this_epoch": lambda trainer: False,
        "_start_after_batches_in_epoch_completed": lambda trainer: 2,
        "_start_after_epochs_completed": lambda trainer: 1,
        "_total_batches_completed": lambda trainer: 7,
        "_use_amp": lambda trainer: True,
        "_validation_data_loader": lambda trainer: Batches(batches(6)),
        "_world_size": lambda trainer: 2,
    },
    "checkpointer": {
        "state_is_sharded": lambda trainer: True,
        "_keep_most_recent_by_age": lambda trainer: 3600,
        "_keep_most_recent_by_count": lambda trainer: 1,
        "_last_save_num_batches_in_epoch_completed": lambda trainer: 1,
        "_last_save_num_epochs_completed": lambda trainer: 1,
        "_last_save_time": lambda trainer: 0.0,
        "_rank": lambda trainer: 1,
        "_save_completed_epochs": lambda trainer: False,
        "_save_every_num_batches": lambda trainer: 1,
        # Asked for when the losses are read, about once a second.
        "_save_every_num_seconds": lambda trainer: 3600,
        "_serialization_dir": lambda trainer: trainer._serialization_dir + "/..",
    },
    "callback": {
        "serialization_dir": lambda trainer: "other",
        "trainer": lambda trainer: trainer,
    },
    "model": {
        "ddp_accelerator": lambda trainer: TorchDdpAccelerator(cuda_device=-1),
        "serialization_dir": lambda trainer: "other",
        "training": lambda trainer: False,
        "vocab": lambda trainer: Vocabulary(),
        "_regularizer": lambda trainer: penalty(0.3),
    },
}
# AllenNLP's own loop sets it to names of its own.
_NOT_SET = {"_best_model_filename"}


def owner_of(owner: str, trainer: Any) -> Any:
    """An object of a trainer."""
    return {
        "trainer": trainer,
        "checkpointer": trainer._checkpointer,
        "callback": trainer._callbacks[0],
        "model": trainer.model,
    }[owner]


def test_every_attribute_has_another_value(tmp_path: Path) -> None:
    trainer = construct(GradientDescentTrainer, tmp_path, TrainerCallback(""))
    own = {*vars(torch.nn.Module()), *vars(trainer.model.layer), "accuracy"} - {"training"}
    for owner, values in OTHER_VALUES.items():
        names = vars(owner_of(owner, trainer)).keys() - _NOT_SET
        assert names - own == values.keys(), owner


@each_stage
@pytest.mark.parametrize(
    "owner, name", [(o, name) for o in OTHER_VALUES for name in OTHER_VALUES[o]]
)
def test_an_attribute_that_is_set_has_its_effect(
    tmp_path: Path, owner: str, name: str, stage: int
) -> None:
    def act(trainer: Any) -> None:
        setattr(owner_of(owner, trainer), name, OTHER_VALUES[owner][name](trainer))

    # The last checkpoint is committed while training ends.
    phases = _IN_TRAINING if owner == "checkpointer" else PHASES
    in_each_phase(tmp_path, name, act, phases, [stage])


@pytest.mark.parametrize("change", ["append", "clear"])
def test_callbacks_may_be_added_and_removed(tmp_path: Path, change: str) -> None:
    def act(trainer: Any) -> None:
        arguments = [Halving("")] if change == "append" else []
        getattr(trainer._callbacks, change)(*arguments)

    in_each_phase(tmp_path, change, act)


# Called


def nothing(_: Any) -> None:
    """For what isn't compared."""


CALLS: Dict[str, Dict[str, Act]] = {
    "trainer": {
        "batch_outputs": lambda trainer: trainer.batch_outputs(batches(7)[0], True),
        "clip_gradient": lambda trainer: trainer.clip_gradient(),
        "get_best_weights_path": lambda trainer: trainer.get_best_weights_path(),
        "get_checkpoint_state": lambda trainer: dict(trainer.get_checkpoint_state().model_state),
        "rescale_gradients": lambda trainer: trainer.rescale_gradients(),
        "train": lambda trainer: trainer.train(),
    },
    "checkpointer": {
        "find_latest_checkpoint": lambda trainer: (
            trainer._checkpointer.find_latest_checkpoint() is None
        ),
        "load_checkpoint": lambda trainer: trainer._checkpointer.load_checkpoint() is None,
        "maybe_save_checkpoint": lambda trainer: nothing(
            trainer._checkpointer.maybe_save_checkpoint(
                trainer, trainer._epochs_completed, trainer._batches_in_epoch_completed
            )
        ),
        "save_checkpoint": lambda trainer: trainer._checkpointer.save_checkpoint(trainer),
    },
    "callback": {
        "load_state_dict": lambda trainer: trainer._callbacks[0].load_state_dict({}),
        "on_backward": lambda trainer: trainer._callbacks[0].on_backward(trainer, {}, False),
        "on_batch": lambda trainer: Halving("").on_batch(
            trainer, [], [], {}, 0, 1, is_training=True
        ),
        "on_end": lambda trainer: TrainerCallback("").on_end(trainer),
        "on_epoch": lambda trainer: TrainerCallback("").on_epoch(trainer, {}, 0),
        "on_start": lambda trainer: TrainerCallback("").on_start(trainer),
        "state_dict": lambda trainer: trainer._callbacks[0].state_dict(),
    },
    "model": {
        "extend_embedder_vocab": lambda trainer: trainer.model.extend_embedder_vocab(),
        "forward": lambda trainer: trainer.model(**batches(8)[0]),
        "forward_on_instances": lambda trainer: trainer.model.forward_on_instances([]),
        "get_metrics": lambda trainer: trainer.model.get_metrics(reset=True),
        "get_parameters_for_histogram_logging": lambda trainer: (
            trainer.model.get_parameters_for_histogram_logging()
        ),
        "get_regularization_penalty": lambda trainer: trainer.model.get_regularization_penalty(),
        "make_output_human_readable": lambda trainer: trainer.model.make_output_human_readable({}),
        "eval": lambda trainer: nothing(trainer.model.eval()),
        "train": lambda trainer: nothing(trainer.model.train()),
        "zero_grad": lambda trainer: trainer.model.zero_grad(),
        "state_dict": lambda trainer: trainer.model.state_dict(),
        "load_state_dict": lambda trainer: (
            trainer.model.load_state_dict({k: v / 2 for k, v in trainer.model.state_dict().items()})
            and None
        ),
    },
}
# Construct, are of a deprecated name, or need an archive or an instance.
_NOT_CALLED = {
    "forward_on_instance",
    "from_archive",
    "from_partial_objects",
    "get_parameters_for_histogram_tensorboard_logging",
    "load",
}
_OF_ALLENNLP: Dict[str, type] = {
    "trainer": GradientDescentTrainer,
    "checkpointer": Checkpointer,
    "callback": TrainerCallback,
    "model": Model,
}


def methods(kind: type) -> Set[str]:
    """Those that a class of AllenNLP defines itself, or a trainer."""
    bases = [base for base in kind.__mro__ if base in (*_OF_ALLENNLP.values(), Trainer)]
    return {
        name
        for base in bases
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, (classmethod, staticmethod))
        if not name.startswith("__")
    }


def test_every_public_method_is_called() -> None:
    for owner, kind in _OF_ALLENNLP.items():
        public = {name for name in methods(kind) if not name.startswith("_")}
        assert public - _NOT_CALLED <= CALLS[owner].keys(), owner


@each_stage
@pytest.mark.parametrize("owner, name", [(o, name) for o in CALLS for name in CALLS[o]])
def test_a_method_that_is_called_has_its_effect(
    tmp_path: Path, owner: str, name: str, stage: int
) -> None:
    # What is changed at the end is lost, with a warning.
    phases = {"train": ("start", "end"), "load_state_dict": _IN_TRAINING}.get(name, PHASES)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    in_each_phase(tmp_path, name, CALLS[owner][name], (*phases, "backward"), [stage])
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# Read


def attributes(trainer: Any) -> Dict[str, Any]:
    """What may be read of a trainer and its model, but for objects."""
    read = {name: plain(getattr(trainer, name)) for name in (*OTHER_VALUES["trainer"], *_NOT_SET)}
    del read["_callbacks"]
    model = trainer.model
    best = plain(trainer._metric_tracker.state_dict())
    # By which a run with another `validation_metric` is known.
    best.pop("tracked_metrics", None)
    return {
        **read,
        **plain(model.state_dict()),
        "training": model.training,
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "best": best,
        "metrics": model.get_metrics(),
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_read_in_each_phase_is_the_same(tmp_path: Path, stage: int) -> None:
    make = functools.partial(Attack, None, attributes, once=False)
    compare(tmp_path, "-", make, stage, "read")


# Overridden

# AllenNLP's loop asserts that there is what it has saved, and copies weights from there.
_NEEDED = ("_save_model_state", "save_checkpoint")
# Weights are saved before a checkpoint, and states and metrics looked at before the first step.
_MORE_OFTEN = ("_save_model_state", "state_dict", "get_metrics")


def overridable(kind: type) -> List[str]:
    return sorted(
        name
        for name in methods(kind)
        if inspect.isfunction(inspect.getattr_static(kind, name)) and name not in _NOT_CALLED
    )


@pytest.mark.parametrize(
    "owner, name",
    [
        (owner, name)
        for owner, kind in _OF_ALLENNLP.items()
        for name in overridable(kind)
        if name not in ("_save_model_state", "state_dict")
    ],
)
def test_a_method_that_an_object_is_given_is_called_as_often(
    tmp_path: Path, owner: str, name: str
) -> None:
    def act(trainer: Any) -> None:
        owned, callback = owner_of(owner, trainer), trainer._callbacks[0]
        method = getattr(owned, name)
        # Before the first step, the names in `validation_metric` are compared with the metrics.
        is_before = isinstance(trainer, DeepSpeedTrainer) and not trainer._total_batches_completed
        callback.calls[name] -= is_before and name == "get_metrics"

        def counting(*args: Any, **kwargs: Any) -> Any:
            callback.calls[name] += 1
            return method(*args, **kwargs)

        setattr(owned, name, counting)

    in_each_phase(tmp_path, name, act, ("start", "epoch"))


@pytest.mark.parametrize(
    "owner, name",
    [
        (owner, name)
        for owner, kind in _OF_ALLENNLP.items()
        for name in overridable(kind)
        if name not in _NEEDED
    ],
)
def test_a_method_that_an_object_is_given_does_nothing(
    tmp_path: Path, owner: str, name: str
) -> None:
    def act(trainer: Any) -> None:
        setattr(owner_of(owner, trainer), name, lambda *args, **kwargs: None)

    in_each_phase(tmp_path, name, act, ("start", "epoch"))


def recording(kind: type, names: List[str], calls: "Counter[str]") -> Any:
    """A subclass that overrides methods, and counts their calls."""

    def overriding(name: str) -> Callable:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(subclass, self), name)(*args, **kwargs)

        return method

    subclass = type(f"Own{kind.__name__}", (kind,), {name: overriding(name) for name in names})
    return subclass


def is_refused(construct: Callable[[], Any], name: str) -> bool:
    try:
        construct().close()
    except ConfigurationError as error:
        assert name in str(error)
        return True
    return False


@pytest.mark.parametrize("owner", _OF_ALLENNLP)
def test_a_method_that_is_overridden_is_called_or_refused(tmp_path: Path, owner: str) -> None:
    own: Dict[str, type] = {"trainer": DeepSpeedTrainer, "checkpointer": DeepSpeedCheckpointer}

    def make(trainer_class: type, kind: Any, directory: str) -> Any:
        (tmp_path / directory).mkdir()
        keyword = {"model": "model_class", "checkpointer": "checkpointer_class"}.get(owner)
        callback = kind("") if owner == "callback" else Attack(None, lambda trainer: None)
        trainer_class = kind if owner == "trainer" else trainer_class
        others = {keyword: kind} if keyword else {}
        return construct(trainer_class, tmp_path / directory, callback, **others)

    base = Net if owner == "model" else _OF_ALLENNLP[owner]
    names, expected = overridable(_OF_ALLENNLP[owner]), Counter[str]()
    make(GradientDescentTrainer, recording(base, names, expected), "expected").train()

    base = own.get(owner, base)
    called = []
    for name in names:
        kind = recording(base, [name], Counter())
        if not is_refused(functools.partial(make, DeepSpeedTrainer, kind, f"one_{name}"), name):
            called.append(name)
    actual = Counter[str]()
    make(DeepSpeedTrainer, recording(base, called, actual), "actual").train()
    for name in called:
        assert actual[name] >= expected[name], name
        assert actual[name] == expected[name] or name in _MORE_OFTEN, name
