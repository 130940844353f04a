"""Trainings in which races are looked for."""

import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import deepspeed
import torch
from allennlp.data import DataLoader, Instance, Vocabulary
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.data.fields import TensorField
from allennlp.models import Model
from allennlp.training import TrainerCallback
from allennlp.training.moving_average import ExponentialMovingAverage
from deepspeed.accelerator import get_accelerator
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.models.contrastive import ContrastiveModel
from tests.races.detector import Detector, Race
from tests.support.side_by_side import CPU, Side
from tests.support.workers import run_workers

DIM = 8
# More elements than DeepSpeed's default for parameters that stage 3 never releases.
NUM_EMBEDDINGS = 110_000 // DIM

# Several buckets of gradients, and parameters that are prefetched, each for more than one module.
BUCKETS = {"reduce_bucket_size": 100}
PREFETCH = {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 0}
DEFAULT = {"stage3_param_persistence_threshold": 100_000}
ACCUMULATE = {"num_gradient_accumulation_steps": 2}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_EMBEDDINGS, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Tanh()) for _ in range(3)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states)
        return states


class Deep(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.encoder = Encoder()

    def forward(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.encoder(ids).square().mean()}


class Contrastive(ContrastiveModel):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.encoder = Encoder()

    def encode(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"ids": self.encoder(ids)}

    def contrastive_loss(  # type: ignore[override]
        self, representations: Dict[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        return {"loss": representations["ids"].square().mean()}


class Changing(Deep):
    """Changes a frozen layer in each forward pass, before it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        weights = list(self.frozen.parameters())
        with deepspeed.zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
            for weight in weights:
                weight.mul_(0.9)
        return {"loss": (self.encoder(ids) + self.frozen(torch.ones(DIM))).square().mean()}


class TwoStreams(Model):
    """
    Computes one of three layers in another stream, as models on GPUs may. Autograd then runs its
    backward pass in that stream too, as soon as the gradient of the sum is computed, and waits for
    it at the end of the backward pass. The layer that is computed first is the last one there, so
    that its gradients are allocated after those of `here` were reduced in the other stream.
    """

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.embedding = nn.Embedding(NUM_EMBEDDINGS, DIM).requires_grad_(False)
        self.first, self.here, self.there = (nn.Linear(DIM, DIM) for _ in range(3))
        self.stream = get_accelerator().Stream()
        self.has_gradient: Any = None

    def forward(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        states, main = self.embedding(ids), get_accelerator().current_stream()
        first = _Branch.apply(self.first(states), self, main)
        self.stream.wait_stream(main)
        with get_accelerator().stream(self.stream):
            there = _Branch.apply(self.there(states), self, self.stream)
        states.record_stream(self.stream)
        there.record_stream(main)
        main.wait_stream(self.stream)
        return {"loss": _Sum.apply(first, there, self.here(states), self).square().mean()}


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *terms: Any) -> torch.Tensor:  # type: ignore[override]
        *tensors, context.model = terms
        return torch.stack(tensors).sum(0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        main, other = get_accelerator().current_stream(), context.model.stream

        def join() -> None:
            main.wait_stream(other)
            get_accelerator().set_stream(main)

        torch.autograd.Variable._execution_engine.queue_callback(join)
        context.model.has_gradient = main.record_event()
        return gradient, gradient, gradient, None


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        context: Any, states: torch.Tensor, model: TwoStreams, stream: Any
    ) -> torch.Tensor:
        context.model, context.stream = model, stream
        return states.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient.record_stream(context.stream)
        context.stream.wait_event(context.model.has_gradient)
        get_accelerator().set_stream(context.stream)
        return gradient.clone(), None, None


class ChangeWeights(TrainerCallback):
    """Changes the weights after each step."""

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        with trainer.modified_weights():
            for parameter in trainer.model.parameters():
                parameter.data.mul_(0.9)


class Evaluate(TrainerCallback):
    """Evaluates after each step, and calls a module of the model."""

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        ids = torch.ones(1, 1, dtype=torch.long)
        with torch.no_grad():
            trainer.model.encoder(ids)
            with trainer.evaluation(of_validation=True):
                trainer.model.encoder(ids)


class Case(NamedTuple):
    """
    A training of two ranks.

    # Parameters

    zero : `Dict[str, Any]`
        DeepSpeed's "zero_optimization".
    arguments : `Dict[str, Any]`, optional (default = `{}`)
        Further ones of `Side`.
    model : `Callable[[], Model]`, optional (default = `Deep`)
    saves : `bool`, optional (default = `False`)
        Whether it saves asynchronously in each epoch, and is trained again for one epoch more.
    """

    zero: Dict[str, Any]
    arguments: Dict[str, Any] = {}
    model: Callable[[], Model] = Deep
    saves: bool = False


def _average(model: Model) -> ExponentialMovingAverage:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ExponentialMovingAverage(trainable, decay=0.9)


_STEP, _MICRO_BATCH = (
    {**ACCUMULATE, "gradient_synchronization": mode} for mode in ("step", "micro_batch")
)
_AVERAGE = {"moving_average": _average}
_RECOMPUTE = {"activation_checkpointing": ["encoder.layers"]}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_OFFLOAD_ALL = {**_OFFLOAD, "offload_param": {"device": "cpu"}}
_BF16 = {"deepspeed_config": {"bf16": {"enabled": True}}}
_ZERO_3 = {"stage": 3, **BUCKETS, **PREFETCH}

CASES: Dict[str, Case] = {
    "1": Case({"stage": 1, **BUCKETS}, ACCUMULATE),
    "1, overlap_comm, moving average": Case(
        {"stage": 1, "overlap_comm": True, **BUCKETS}, {**ACCUMULATE, **_AVERAGE}
    ),
    "2": Case({"stage": 2, **BUCKETS}, ACCUMULATE),
    "2, overlap_comm, step": Case({"stage": 2, "overlap_comm": True, **BUCKETS}, _STEP),
    "2, overlap_comm, micro_batch, bf16, moving average": Case(
        {"stage": 2, "overlap_comm": True, **BUCKETS}, {**_MICRO_BATCH, **_BF16, **_AVERAGE}
    ),
    "2, overlap_comm, recomputation, saves": Case(
        {"stage": 2, "overlap_comm": True, **BUCKETS}, _RECOMPUTE, saves=True
    ),
    "2, overlap_comm, offload": Case(
        {"stage": 2, "overlap_comm": True, **BUCKETS, **_OFFLOAD}, _MICRO_BATCH
    ),
    "2, overlap_comm, gradient caching": Case(
        {"stage": 2, "overlap_comm": True, **BUCKETS},
        {"grad_cache": {"chunk_size": 2}},
        Contrastive,
    ),
    "2, overlap_comm, two streams": Case(
        {"stage": 2, "overlap_comm": True, **BUCKETS}, {}, TwoStreams
    ),
    "3": Case(_ZERO_3, ACCUMULATE),
    "3, default threshold": Case({**_ZERO_3, **DEFAULT}, ACCUMULATE),
    "3, overlap_comm false": Case({**_ZERO_3, "overlap_comm": False}, ACCUMULATE),
    "3, step, resharded": Case(_ZERO_3, {**_STEP, "reshard_after_micro_batch": True}),
    "3, micro_batch, not resharded, moving average, saves": Case(
        _ZERO_3, {**_MICRO_BATCH, **_AVERAGE, "reshard_after_micro_batch": False}, saves=True
    ),
    "3, default threshold, bf16, moving average, saves": Case(
        {**_ZERO_3, **DEFAULT}, {**ACCUMULATE, **_BF16, **_AVERAGE}, saves=True
    ),
    "3, recomputation": Case(_ZERO_3, _RECOMPUTE),
    "3, not resharded, evaluated in steps, moving average": Case(
        _ZERO_3,
        {**_AVERAGE, "reshard_after_micro_batch": False, "callbacks": lambda: [Evaluate("")]},
    ),
    "3, weights changed by a callback": Case(_ZERO_3, {"callbacks": lambda: [ChangeWeights("")]}),
    "3, weights changed in forward passes": Case(_ZERO_3, ACCUMULATE, Changing),
    "3, constructed sharded": Case(_ZERO_3, {**ACCUMULATE, "is_constructed_partitioned": True}),
    "3, offload": Case({**_ZERO_3, **_OFFLOAD}, ACCUMULATE),
    "3, offload of parameters": Case({**_ZERO_3, **_OFFLOAD_ALL}, ACCUMULATE),
    "3, gradient caching": Case(_ZERO_3, {"grad_cache": {"chunk_size": 2}}, Contrastive),
}


class Found(NamedTuple):
    """What a rank has found in a training."""

    num_operations: int
    races: Dict[Race, int]
    own_calls: List[str]


def loader(rank: int) -> DataLoader:
    generator = torch.Generator().manual_seed(rank)
    instances = [
        Instance({"ids": TensorField(torch.randint(NUM_EMBEDDINGS, (3,), generator=generator))})
        for _ in range(16)
    ]
    return SimpleDataLoader(instances, 4, vocab=Vocabulary())


def find_races(case: Case, ignored_call: Optional[str] = None) -> List[Found]:
    """Trains, and returns what each rank has found."""

    def train(rank: int) -> Found:
        detector = Detector(ignored_call)
        with detector.detect():
            for num_epochs in (2, 3) if case.saves else (2,):
                arguments = {**case.arguments, "num_epochs": num_epochs}
                if case.saves:
                    arguments["checkpointer"] = DeepSpeedCheckpointer(directory, async_save=True)
                side = Side(
                    case.model,
                    loader,
                    case.zero["stage"],
                    world_size=2,
                    zero=case.zero,
                    validation_data_loader=loader(rank),
                    **arguments,
                )
                side.on_rank(rank, lambda trainer: trainer.train(), directory)
        return Found(detector.num_operations, dict(detector.races), sorted(detector.own_calls))

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        return run_workers(2, train)


def find_races_of_deepspeed(zero: Dict[str, Any], has_timer: bool) -> List[Found]:
    """Returns what each rank has found in a training by DeepSpeed alone."""

    def train(rank: int) -> Found:
        detector = Detector()
        with process_environment(CPU, rank), detector.detect():
            model = Deep()
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_optimization": zero,
                    "zero_allow_untested_optimizer": True,
                    "timers": {"throughput": {"enabled": has_timer}},
                },
            )
            for batch in [*loader(rank)] * 2:
                engine.backward(engine(**batch)["loss"])
                engine.step()
        return Found(detector.num_operations, dict(detector.races), [])

    return run_workers(2, train)
