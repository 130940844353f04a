"""
Parameters that are frozen and unfrozen, that share memory, are of any type or have no shape yet;
gradients that aren't finite; what comes back with the best weights. Each is as with
`gradient_descent`, or is refused.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.common import Lazy, Params
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from torch import nn
from torch.nn.utils import parametrizations

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.engine.process.process_environment import process_environment
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, error_of_training
from tests.support.workers import run_workers

DIM = 4
# Each ZeRO stage, in one process or with two workers.
STAGES = [(0, 1), (0, 2), (1, 2), (2, 1), (3, 1), (3, 2)]
SHARDED = [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]


def _nothing(model: Any) -> None:
    pass


class Layers(Model):
    """A regression whose parts the tests add to."""

    def __init__(self, add: Callable[["Layers"], None] = _nothing) -> None:
        super().__init__(Vocabulary())
        self.encoder = nn.Linear(DIM, DIM)
        self.decoder = nn.Linear(DIM, DIM)
        self.penalty: Callable[[Layers, torch.Tensor], Any] = lambda model, x: 0
        add(self)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        output = self.decoder(self.encoder(x).tanh())
        return {"loss": (output - 1).pow(2).mean() + self.penalty(self, x)}


def _vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(3, DIM, generator=generator)} for _ in range(4)]


def _same_vectors(rank: int) -> List[Dict[str, Any]]:
    """Two workers with them train as one process does."""
    return _vectors(0)


# Frozen and unfrozen


def _freeze_encoder(model: Layers) -> None:
    model.encoder.weight.requires_grad_(False)


class Switch(TrainerCallback):
    """Freezes and unfreezes the encoder's weight: at the start, or after so many steps."""

    def __init__(self, trainable: Dict[int, bool]) -> None:
        super().__init__("")
        self._trainable = trainable
        self._num_steps = 0

    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        self._switch(trainer)

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        self._num_steps += 1
        self._switch(trainer)

    def _switch(self, trainer: Any) -> None:
        if self._num_steps in self._trainable:
            trainer.model.encoder.weight.requires_grad_(self._trainable[self._num_steps])


SWITCHES = {
    "off": {2: False},
    "off and on": {0: False, 3: True},
    "twice off": {1: False, 2: True, 5: False},
}


SWITCHES_OF_SHARDS = [(w, *s) for w, s in zip([*SWITCHES, *SWITCHES], SHARDED)]


@pytest.mark.parametrize(
    "which, world_size, grad_norm",
    [
        *(("off", 1, 0.1), ("off", 2, False), ("off and on", 2, 0.1), ("twice off", 2, 0.1)),
        *(("on", 1, False), ("on", 2, 0.1)),
    ],
)
def test_at_stage_0_a_frozen_parameter_is_not_stepped(which: str, world_size: int, grad_norm: Any):
    def side(stage: Optional[int], world_size: int) -> Side:
        callbacks = lambda: [Switch({**SWITCHES, "on": {2: True}}[which])]  # noqa: E731
        model = lambda: Layers(_freeze_encoder if which == "on" else _nothing)  # noqa: E731
        arguments = {"callbacks": callbacks, "grad_norm": grad_norm}
        return Side(model, _same_vectors, stage, world_size, **arguments)

    assert_same_weights(side(0, world_size).train(), side(None, 1).train())


@pytest.mark.parametrize("which, stage, world_size", SWITCHES_OF_SHARDS)
def test_freezing_is_refused_where_parameters_are_sharded(
    which: str, stage: int, world_size: int, expect_message: Callable[[str], None]
):
    side = Side(Layers, _vectors, stage, world_size, callbacks=lambda: [Switch(SWITCHES[which])])
    (message,) = set(side.on_all_ranks(error_of_training))
    assert "'encoder.weight'" in message
    expect_message(message)


def _sgd_of_trainable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.3)


@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_what_the_optimizer_has_not_got_is_refused(
    stage: int, expect_message: Callable[[str], None]
):
    side = Side(
        lambda: Layers(_freeze_encoder),
        _vectors,
        stage,
        optimizer=_sgd_of_trainable,
        callbacks=lambda: [Switch({2: True})],
    )
    (message,) = side.on_all_ranks(error_of_training)
    assert "'encoder.weight'" in message
    expect_message(message)


class SwitchGroups(Switch):
    """The same for all that the optimizer's groups have."""

    def _switch(self, trainer: Any) -> None:
        if self._num_steps in self._trainable:
            for group in trainer.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(self._trainable[self._num_steps])


@pytest.mark.parametrize("which, stage, world_size", SWITCHES_OF_SHARDS)
def test_freezing_what_the_optimizer_has_is_refused_where_it_has_shards(
    which: str, stage: int, world_size: int
):
    side = Side(
        Layers, _vectors, stage, world_size, callbacks=lambda: [SwitchGroups(SWITCHES[which])]
    )
    assert all(
        "'encoder.weight' was frozen" in error for error in side.on_all_ranks(error_of_training)
    )


class ChangeGroups(TrainerCallback):
    """Changes all that the optimizer's groups have, after each step."""

    def __init__(self, change: Callable[[torch.nn.Parameter], Any]) -> None:
        super().__init__("")
        self._change = change

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                self._change(parameter)


@torch.no_grad()
def _halve(parameter: torch.nn.Parameter) -> None:
    parameter.mul_(0.5)


def _halve_data(parameter: torch.nn.Parameter) -> None:
    parameter.data *= 0.5


@pytest.mark.parametrize("change", [_halve, _halve_data])
@pytest.mark.parametrize("stage, world_size", [(0, 1), *SHARDED])
def test_changing_what_the_optimizer_has_is_exact_or_refused(
    change: Callable[[torch.nn.Parameter], Any], stage: int, world_size: int
):
    def side(stage: Optional[int]) -> Side:
        callbacks = lambda: [ChangeGroups(change)]  # noqa: E731
        return Side(Layers, _vectors, stage, world_size, callbacks=callbacks)

    if stage == 0:
        assert_same_weights(side(0).train(), side(None).train())
        return
    for error in side(stage).on_all_ranks(error_of_training):
        assert "with trainer.modified_weights():" in error


@pytest.mark.parametrize(
    "schedule",
    [
        {"type": "slanted_triangular", "gradual_unfreezing": True},
        {
            "type": "slanted_triangular",
            "gradual_unfreezing": True,
            "discriminative_fine_tuning": True,
        },
        {
            "type": "combined",
            "schedulers": [[1, {"type": "slanted_triangular", "gradual_unfreezing": True}]],
        },
    ],
    ids=["alone", "with discriminative fine-tuning", "combined"],
)
def test_gradual_unfreezing_is_refused_before_a_schedule_is_constructed(
    schedule: Dict[str, Any], expect_message: Callable[[str], None]
):
    lazy = Lazy(LearningRateScheduler, Params(schedule))
    side = Side(Layers, _vectors, 2, learning_rate_scheduler=lazy)
    expect_message(side.refusal())


# Gradients that aren't finite


def _root_at_0(model: Layers) -> None:
    def penalty(model: Layers, x: torch.Tensor) -> Any:
        # Its value is 0, and its gradient 0 times infinity.
        return (model.encoder.bias * 0).sqrt().sum() if x.sum() == 0 else 0

    model.penalty = penalty


def _zeros_in_step_3(rank: int) -> List[Dict[str, Any]]:
    batches = _vectors(rank)
    batches[2]["x"] = torch.zeros(3, DIM) if rank == 0 else batches[2]["x"]
    return batches


@pytest.mark.parametrize(
    "stage, world_size, precision",
    [
        (None, 1, "fp32"),
        *((*case, "fp32") for case in STAGES),
        *((*case, "bf16") for case in [(0, 1), (1, 2), (2, 1), (3, 2)]),
        (1, 1, "torch_autocast"),
    ],
)
def test_nan_gradients_of_a_finite_loss_end_the_training(
    stage: Optional[int], world_size: int, precision: str, expect_message: Callable[[str], None]
):
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    settings = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "torch_autocast": autocast}
    side = Side(
        lambda: Layers(_root_at_0),
        _zeros_in_step_3,
        stage,
        world_size,
        deepspeed_config=settings[precision],
        log_every_num_steps=1,
    )
    (message,) = set(side.on_all_ranks(error_of_training))
    expect_message(message)


def _not_a_number(rank: int) -> List[Dict[str, Any]]:
    batches = _vectors(rank)
    batches[2]["x"] = batches[2]["x"] * (float("nan") if rank == 0 else 1)
    return batches


@pytest.mark.parametrize("stage, world_size", [(0, 1), (2, 2), (3, 2)])
def test_a_loss_of_nan_is_what_is_shown_where_there_is_one(stage: int, world_size: int):
    side = Side(Layers, _not_a_number, stage, world_size)
    (message,) = set(side.on_all_ranks(error_of_training))
    assert "nan loss encountered at step 3 of epoch 1" in message


# Shared memory


def _share_data(model: Layers) -> None:
    model.decoder.weight.data = model.encoder.weight.data


def _wrap_again(model: Layers) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight)


def _share_rows(model: Layers) -> None:
    model.rows = nn.Parameter(model.encoder.weight[1:])
    model.penalty = lambda model, x: model.rows.sum()


def _frozen_alias(model: Layers) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight.data, requires_grad=False)


def _buffer(model: Layers) -> None:
    model.register_buffer("copied", model.encoder.weight.data.t())
    model.penalty = lambda model, x: (x @ model.copied).mean()


SHARING = [_share_data, _wrap_again, _share_rows, _frozen_alias, _buffer]


@pytest.mark.parametrize("share, stage, world_size", zip(SHARING, *zip(*SHARDED)))
def test_parameters_that_share_memory_are_refused_where_it_would_be_lost(
    share: Callable[[Layers], None],
    stage: int,
    world_size: int,
    expect_message: Callable[[str], None],
):
    expect_message(Side(lambda: Layers(share), _vectors, stage, world_size).refusal())


@pytest.mark.parametrize("share", [_share_data, _wrap_again])
def test_parameters_that_share_memory_are_refused_while_they_are_constructed_partitioned(
    share: Callable[[Layers], None],
):
    side = Side(lambda: Layers(share), _vectors, 3, is_constructed_partitioned=True)
    message = side.refusal()
    assert "'encoder.weight'" in message and "'decoder.weight'" in message


def test_parameters_that_share_memory_are_refused_in_half_precision():
    bf16 = {"bf16": {"enabled": True}}
    side = Side(lambda: Layers(_share_data), _vectors, 0, deepspeed_config=bf16)
    assert "'encoder.weight' and 'decoder.weight'" in side.refusal()


@pytest.mark.parametrize("share", SHARING)
def test_parameters_that_share_memory_are_exact_at_stage_0(share: Callable[[Layers], None]):
    sides = [Side(lambda: Layers(share), _vectors, stage) for stage in (0, None)]
    assert_same_weights(*(side.train() for side in sides))


def _tie(model: Layers) -> None:
    model.decoder.weight = model.encoder.weight


def _split_columns(model: Layers) -> None:
    left, right = torch.randn(DIM, DIM).chunk(2, dim=1)
    model.left, model.right = nn.Parameter(left), nn.Parameter(right)
    model.penalty = lambda model, x: (model.left - model.right).pow(2).sum()


@pytest.mark.parametrize(
    "add, stage, world_size",
    [(_tie, 1, 2), (_tie, 3, 1), (_split_columns, 2, 1), (_split_columns, 3, 2)],
)
def test_one_parameter_with_two_names_and_two_without_common_elements_are_exact(
    add: Callable[[Layers], None], stage: int, world_size: int
):
    sides = [Side(lambda: Layers(add), _vectors, each, world_size) for each in (stage, None)]
    assert_same_weights(*(side.train() for side in sides))


# Attributes in the memory of a parameter


def _look_up(find: Callable[[Layers], torch.Tensor]) -> Callable[[Layers, torch.Tensor], Any]:
    """A penalty on what the model computes with an attribute."""
    return lambda model, x: (model.encoder(x) * find(model).float().sum()).sin().mean()


def _as_data(model: Layers) -> None:
    model.table = model.encoder.weight.data
    model.penalty = _look_up(lambda model: model.table)


def _in_a_child_with_a_graph(model: Layers) -> None:
    model.decoder.transposed = model.encoder.weight.t()[1:]
    model.penalty = _look_up(lambda model: model.decoder.transposed)


def _in_objects(model: Layers) -> None:
    model.parts = SimpleNamespace(rows=[{"last": model.encoder.weight.detach()[-1]}])
    model.hidden = [nn.Linear(DIM, DIM)]
    model.hidden[0].weight.data = model.decoder.weight.data
    model.penalty = _look_up(lambda model: model.parts.rows[0]["last"] + model.hidden[0].weight[0])


def _as_array(model: Layers) -> None:
    model.table = model.encoder.weight.detach().numpy()
    model.penalty = _look_up(lambda model: torch.from_numpy(model.table))


def _of_another_type(model: Layers) -> None:
    model.table = model.encoder.weight.data.view(torch.int32)
    model.penalty = _look_up(lambda model: model.table.view(torch.float32))


def _in_the_first_pass(model: Layers) -> None:
    def find(model: Layers) -> torch.Tensor:
        if not hasattr(model, "table"):
            model.table = model.encoder.weight.data
        return model.table

    model.penalty = _look_up(find)


def _in_each_pass(model: Layers) -> None:
    def find(model: Layers) -> torch.Tensor:
        model.tables = [model.encoder.weight.t()]
        return model.tables[0]

    model.penalty = _look_up(find)


def _of_frozen(model: Layers) -> None:
    _freeze_encoder(model)
    _as_data(model)


def _of_spectral_norm(model: Layers) -> None:
    nn.utils.spectral_norm(model.decoder)


IN_ATTRIBUTES = [_as_data, _in_a_child_with_a_graph, _in_objects, _in_the_first_pass]


@pytest.mark.parametrize(
    "share, stage, world_size",
    [
        *zip(IN_ATTRIBUTES, *zip((1, 2), (2, 1), (2, 2), (2, 2))),
        (_as_array, 0, 1),
        (_in_each_pass, 3, 2),
        (_of_frozen, 3, 2),
        (_of_spectral_norm, 2, 1),
    ],
)
def test_attributes_follow_the_parameter_that_they_share_memory_with(
    share: Callable[[Layers], None], stage: int, world_size: int
):
    sides = [Side(lambda: Layers(share), _vectors, each, world_size) for each in (stage, None)]
    assert_same_weights(*(side.train() for side in sides))


@pytest.mark.parametrize("stage", [0, 2])
def test_attributes_follow_the_parameter_in_half_precision(stage: int):
    def last_differences(trainer: Any) -> List[float]:
        trainer.train()
        model = trainer.model
        of_engine = float((model.table - model.encoder.weight).abs().max())
        trainer.close()  # here the weights are in fp32 again
        assert model.table.dtype == torch.float32
        return [of_engine, float((model.table - model.encoder.weight).abs().max())]

    def train(rank: int) -> List[float]:
        with process_environment(torch.device("cpu"), rank):
            side = Side(lambda: Layers(_as_data), _vectors, stage, deepspeed_config=bf16)
            return last_differences(side.construct(rank, None))

    bf16 = {"bf16": {"enabled": True}}
    assert run_workers(1, train) == [[0, 0]]


@pytest.mark.parametrize(
    "share, stage, is_partitioned",
    [
        (_as_array, 1, False),
        (_of_another_type, 2, False),
        (_as_data, 3, False),
        (_in_a_child_with_a_graph, 3, True),
        (_as_array, 3, True),
    ],
)
def test_attributes_that_cannot_follow_the_parameter_are_refused(
    share: Callable[[Layers], None],
    stage: int,
    is_partitioned: bool,
    expect_message: Callable[[str], None],
):
    side = Side(lambda: Layers(share), _vectors, stage, is_constructed_partitioned=is_partitioned)
    expect_message(side.refusal())


@pytest.mark.parametrize("world_size, threshold", [(1, 0), (2, 0), (2, 100)])
def test_an_attribute_that_the_first_pass_makes_is_an_error_at_stage_3(
    world_size: int, threshold: int
):
    zero = {"stage3_param_persistence_threshold": threshold}
    side = Side(lambda: Layers(_in_the_first_pass), _vectors, 3, world_size, zero=zero)
    for message in side.on_all_ranks(error_of_training):
        assert "'table'" in message and "'encoder.weight'" in message


# What comes back with the best weights


class Count(nn.Module):
    """Counts outside of tensors, in tensors of types that backends can't send, and in a list."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.count = 0
        self.names: List[str] = []
        self.computed = torch.zeros(2, dtype=torch.int16)
        if has_buffers:
            self.register_buffer("short", torch.zeros((), dtype=torch.int16))
            self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
            self.register_buffer("flags", torch.zeros(9, dtype=torch.bool))
            self.register_buffer("sparse", torch.zeros(3).to_sparse())
        self.register_buffer("precise", torch.zeros(2, dtype=torch.float64))

    def add(self) -> None:
        self.count += 1
        self.names.append(str(self.count))
        self.computed += 1
        for _, buffer in self.named_buffers():
            if buffer.layout is torch.sparse_coo:
                self.sparse = self.sparse + torch.tensor([1.0, 0, 0]).to_sparse()
            elif buffer.dtype == torch.bool:
                buffer[self.count % 9] = True
            else:
                buffer.add_(1 / 3 if buffer.is_floating_point() else 1)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "names": list(self.names)}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.names = state["count"], state["names"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}computed"] = self.computed.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.computed = state_dict.pop(f"{prefix}computed")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def everything(self) -> Dict[str, Any]:
        buffers = {name: buffer.to_dense().tolist() for name, buffer in self.named_buffers()}
        return {**self.get_extra_state(), "computed": self.computed.tolist(), **buffers}


class Counting(Layers):
    """Is best after its first epoch."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.counter = Count(has_buffers)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if self.training:
            self.counter.add()
        return super().forward(x)

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"score": -float(self.counter.count)}


@pytest.mark.parametrize("stage, world_size", [(0, 1), (2, 2), (3, 2)])
def test_all_of_the_state_comes_back_with_the_best_weights(stage: int, world_size: int):
    def everything(trainer: Any) -> Dict[str, Any]:
        trainer.train()
        return trainer.model.counter.everything()

    def states(stage: Optional[int]) -> List[Dict[str, Any]]:
        side = Side(
            lambda: Counting(has_buffers=world_size == 1),
            _vectors,
            stage,
            world_size,
            validation_data_loader=Batches(_vectors(1)),
            validation_metric="+score",
            num_epochs=3,
        )
        return side.on_all_ranks(everything)

    expected = states(None)
    assert expected[0]["count"] == len(_vectors(0))
    assert states(stage) == expected


class Opaque(nn.Module):
    def get_extra_state(self) -> Any:
        return Vocabulary()


def test_a_state_that_could_not_be_loaded_again_is_refused(expect_message: Callable[[str], None]):
    def add(model: Layers) -> None:
        model.opaque = Opaque()

    side = Side(lambda: Layers(add), _vectors, 2, checkpointer=Lazy(DeepSpeedCheckpointer))

    (message,) = side.on_all_ranks(error_of_training)
    expect_message(message)


# Properties of modules


class Watched(nn.Module):
    """Counts how often properties of the names that embeddings have are evaluated."""

    num_evaluations = 0

    def _count(self) -> Any:
        Watched.num_evaluations += 1
        return None

    weight = max_norm = sparse = is_quantized = bias = padding_idx = property(_count)


def _add_watched(model: Layers) -> None:
    model.watched = Watched()


def _normalize(model: Layers) -> None:
    parametrizations.spectral_norm(model.encoder)
    # From here each evaluation of the weight changes it. PyTorch begins where none does any more.
    nn.init.constant_(model.encoder.parametrizations.weight[0]._v, DIM**-0.5)


def test_properties_of_modules_are_not_evaluated():
    def count(trainer: Any) -> int:
        trainer.train()
        return Watched.num_evaluations

    side = Side(
        lambda: Layers(_add_watched), _vectors, 3, 2, validation_data_loader=Batches(_vectors(1))
    )
    assert side.on_all_ranks(count) == [0, 0]


@pytest.mark.parametrize("stage, world_size", [(0, 1), (3, 2)])
def test_power_iterations_of_a_spectral_norm_are_those_of_gradient_descent(
    stage: int, world_size: int
):
    sides = [
        Side(
            lambda: Layers(_normalize),
            _vectors,
            each,
            world_size,
            validation_data_loader=Batches(_vectors(1)),
        )
        for each in (stage, None)
    ]
    assert_same_weights(*(side.train() for side in sides))


# Types of parameters


def _doubles(model: Layers) -> None:
    model.double()
    model.penalty = lambda model, x: 0


def _one_double(model: Layers) -> None:
    model.double_scale = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    model.penalty = lambda model, x: (x.double() * model.double_scale).pow(2).mean().float()


def _complex(model: Layers) -> None:
    model.phases = nn.Parameter(torch.ones(DIM, dtype=torch.complex64))
    model.penalty = lambda model, x: (x * model.phases).abs().mean()


@pytest.mark.parametrize(
    "add, stage, world_size",
    [
        (_doubles, 0, 1),
        (_doubles, 1, 2),
        (_one_double, 2, 1),
        (_one_double, 3, 2),
        (_complex, 0, 2),
    ],
)
def test_trainable_parameters_of_other_types_are_refused(
    add: Callable[[Layers], None],
    stage: int,
    world_size: int,
    expect_message: Callable[[str], None],
):
    expect_message(Side(lambda: Layers(add), _vectors, stage, world_size).refusal())


@pytest.mark.parametrize(
    "add, name, precision",
    [
        (_one_double, "double_scale", "fp32"),
        (_complex, "phases", "bf16"),
        (_doubles, "encoder.weight", "fp32"),
        (_doubles, "encoder.weight", "bf16"),
    ],
)
def test_trainable_parameters_of_other_types_are_refused_when_constructed_partitioned(
    add: Callable[[Layers], None], name: str, precision: str
):
    config: Any = {"zero_optimization": {"stage": 3}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    side = Side(
        lambda: Layers(add),
        _vectors,
        3,
        is_constructed_partitioned=True,
        deepspeed_config=config,
    )
    assert f"The parameter '{name}'" in side.refusal()


FROZEN = {
    "float64": torch.linspace(0, 1, DIM, dtype=torch.float64),
    "complex64": torch.linspace(0, 1, DIM) * 1j,
    "int64": torch.arange(DIM) + 2**40,
    "uint8": torch.arange(DIM, dtype=torch.uint8),
    "bool": torch.arange(DIM) > 1,
}


def _frozen(model: Layers) -> None:
    model.frozen = nn.ParameterDict(
        {name: nn.Parameter(value.clone(), requires_grad=False) for name, value in FROZEN.items()}
    )

    def penalty(model: Layers, x: torch.Tensor) -> Any:
        scaled = [(x * value).abs().sum().float() for value in model.frozen.values()]
        scaled.append(model.precise(x.double()).abs().sum().float())
        return torch.stack(scaled).clamp(max=2).mean() * model.encoder.bias.sum().pow(2)

    model.penalty = penalty
    model.precise = nn.Linear(DIM, DIM)
    model.precise.double().requires_grad_(False)


@pytest.mark.parametrize(
    "stage, world_size, is_constructed_partitioned",
    [*(pytest.param(*each, False, id="-".join(map(str, each))) for each in STAGES)]
    + [pytest.param(3, n, True, id=f"3-{n}-partitioned") for n in (1, 2)],
)
def test_frozen_parameters_of_other_types_are_as_they_were(
    tmp_path: Path, stage: int, world_size: int, is_constructed_partitioned: bool
):
    sides = [
        Side(
            lambda: Layers(_frozen),
            _vectors,
            each,
            world_size,
            is_constructed_partitioned=is_constructed_partitioned,
        )
        for each in (stage, None)
    ]
    actual, expected = (side.train(tmp_path / str(side.stage)) for side in sides)
    assert_same_weights(actual, expected)
    archived = torch.load(tmp_path / str(stage) / "best.th")
    for name, value in FROZEN.items():
        assert actual[f"frozen.{name}"].equal(value)
        assert archived[f"frozen.{name}"].equal(value)


def _frozen_first(model: Layers) -> None:
    model.indices = nn.Parameter(torch.arange(DIM), requires_grad=False)


def _frozen_short(model: Layers) -> None:
    model.decoder.indices = nn.Parameter(torch.arange(DIM, dtype=torch.int16), requires_grad=False)


@pytest.mark.parametrize("add, stage", [(_frozen_first, 1), (_frozen_first, 3), (_frozen_short, 3)])
def test_frozen_parameters_that_cannot_be_sharded_are_refused(
    add: Callable[[Layers], None], stage: int, expect_message: Callable[[str], None]
):
    expect_message(Side(lambda: Layers(add), _vectors, stage).refusal())


def _lazy_layer(model: Layers) -> None:
    model.decoder = nn.LazyLinear(DIM)


def _lazy_buffers(model: Layers) -> None:
    model.normalization = nn.LazyBatchNorm1d(affine=False)


@pytest.mark.parametrize(
    "add, stage, is_constructed_partitioned",
    [(_lazy_layer, 0, False), (_lazy_buffers, 1, False), (_lazy_layer, 2, False)]
    + [(_lazy_layer, 3, True)],
)
def test_lazy_modules_are_refused(
    add: Callable[[Layers], None],
    stage: int,
    is_constructed_partitioned: bool,
    expect_message: Callable[[str], None],
):
    side = Side(
        lambda: Layers(add), _vectors, stage, is_constructed_partitioned=is_constructed_partitioned
    )
    expect_message(side.refusal())
