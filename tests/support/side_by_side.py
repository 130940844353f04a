"""
Trains one small model with AllenNLP's trainer and with this package's, in forked workers.
"""

import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Type

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import DataLoader, Vocabulary
from allennlp.models import Model
from allennlp.nn.parallel import TorchDdpAccelerator
from allennlp.training import GradientDescentTrainer

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine.parameters import full_parameters
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.zero3.partitioned_construction import PartitionedConstruction
from tests.support.experiment import assert_same_weights
from tests.support.workers import run_workers

CPU = torch.device("cpu")
Batch = Dict[str, Any]


class Batches(DataLoader):
    """A list of batches as a data loader."""

    def __init__(self, batches: List[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def iter_instances(self) -> Iterator[Any]:
        return iter([])

    def index_with(self, vocab: Vocabulary) -> None:
        pass

    def set_target_device(self, device: torch.device) -> None:
        pass


class Side:
    """
    How to train.

    # Parameters

    model : `Callable[[], Model]`
        Constructs it, on each worker.
    batches : `Callable[[int], Any]`
        Those of a rank, a list or a loader.
    stage : `int`, optional (default = `None`)
        Of ZeRO. `None` for the "gradient_descent" trainer.
    world_size : `int`, optional (default = `1`)
    is_constructed_partitioned : `bool`, optional (default = `False`)
    deepspeed_config : `Dict[str, Any]`, optional (default = `{}`)
        But for the stage.
    zero : `Dict[str, Any]`, optional (default = `{}`)
        But for the stage.
    optimizer : optional (default = SGD with a large learning rate)
    moving_average : `Callable[[Model], Any]`, optional (default = none)
    trainer_class : `Type[DeepSpeedTrainer]`, optional (default = `DeepSpeedTrainer`)
    arguments : `Any`
        Of the trainer.
    """

    def __init__(
        self,
        model: Callable[[], Model],
        batches: Callable[[int], Any],
        stage: Optional[int] = None,
        world_size: int = 1,
        is_constructed_partitioned: bool = False,
        deepspeed_config: Optional[Dict[str, Any]] = None,
        zero: Optional[Dict[str, Any]] = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
            parameters, lr=0.3
        ),
        callbacks: Callable[[], List[Any]] = list,
        moving_average: Callable[[Model], Any] = lambda model: None,
        trainer_class: Type[DeepSpeedTrainer] = DeepSpeedTrainer,
        **arguments: Any,
    ) -> None:
        self.model = model
        self.batches = batches
        self.stage = stage
        self.world_size = world_size
        self.is_constructed_partitioned = is_constructed_partitioned
        self.deepspeed_config = {
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                **(zero or {}),
            },
            **(deepspeed_config or {}),
        }
        self.optimizer = optimizer
        self.callbacks = callbacks
        self.moving_average = moving_average
        self.trainer_class = trainer_class
        self.arguments = arguments

    def construct(self, rank: int, directory: Path) -> GradientDescentTrainer:
        """To be called by every rank."""
        torch.manual_seed(7)
        batches = self.batches(rank)
        arguments = {
            "data_loader": Batches(batches) if isinstance(batches, list) else batches,
            "num_epochs": 2,
            "cuda_device": -1,
            "serialization_dir": directory,
            "enable_default_callbacks": False,
            "run_confidence_checks": False,
            "distributed": self.world_size > 1,
            "local_rank": rank,
            "world_size": self.world_size,
            "callbacks": self.callbacks(),
            **self.arguments,
        }
        if self.stage is None:
            model = self.model()
            if self.world_size > 1:
                accelerator = TorchDdpAccelerator(
                    local_rank=rank, world_size=self.world_size, cuda_device=-1
                )
                model, arguments["ddp_wrapped_model"] = accelerator.wrap_model(model)
            self._add_parts(arguments, model)
            return GradientDescentTrainer(**arguments)
        if self.is_constructed_partitioned:
            with PartitionedConstruction(self.deepspeed_config, CPU, rank) as construction:
                model = self.model()
                construction.finish(model)
        else:
            model = self.model()
        self._add_parts(arguments, model)
        return self.trainer_class(**arguments, deepspeed_config=self.deepspeed_config)

    def _add_parts(self, arguments: Dict[str, Any], model: Model) -> None:
        arguments.update(
            model=model,
            optimizer=self.optimizer(model.parameters()),
            moving_average=self.moving_average(model),
        )

    def on_rank(
        self, rank: int, function: Callable[[Any], Any], serialization_dir: Optional[Path] = None
    ) -> Any:
        """
        What `function` returns, given a trainer whose engine stays up. To be called by every rank.
        """
        with process_environment(CPU, rank), tempfile.TemporaryDirectory() as directory:
            trainer = self.construct(rank, serialization_dir or Path(directory))
            if not isinstance(trainer, DeepSpeedTrainer):
                return function(trainer)
            with trainer.session():
                return function(trainer)

    def on_all_ranks(
        self, function: Callable[[Any], Any], serialization_dir: Optional[Path] = None
    ) -> List[Any]:
        """What `function` returns on each rank, which are forked for it."""
        with tempfile.TemporaryDirectory() as directory:
            path = serialization_dir or Path(directory)
            return run_workers(self.world_size, lambda rank: self.on_rank(rank, function, path))

    def refusal(self) -> str:
        """The message of the `ConfigurationError` that all ranks raise when the trainer is made."""

        def construct(rank: int) -> str:
            with process_environment(CPU, rank), pytest.raises(ConfigurationError) as error:
                self.construct(rank, Path(directory))
            return str(error.value)

        with tempfile.TemporaryDirectory() as directory:
            (message,) = set(run_workers(self.world_size, construct))
        return message

    def train(self, serialization_dir: Optional[Path] = None) -> Dict[str, torch.Tensor]:
        """The weights, which all ranks have, and rank 0's buffers after training."""

        def train_and_save(trainer: Any) -> Any:
            return trained(trainer), [name for name, _ in trainer.model.named_parameters()]

        (first, names), *others = self.on_all_ranks(train_and_save, serialization_dir)
        weights = {name: torch.tensor(array) for name, array in first.items()}
        for arrays, _ in others:
            of_rank = {name: torch.tensor(arrays[name]) for name in names}
            assert_same_weights(of_rank, {name: weights[name] for name in names}, tolerance=1e-6)
        return weights


def error_of_training(trainer: Any) -> str:
    """Its class and its message."""
    with pytest.raises(Exception) as error:
        trainer.train()
    return f"{type(error.value).__name__}: {error.value}"


def trained(trainer: Any) -> Dict[str, Any]:
    """`state_arrays` after training."""
    trainer.train()
    return state_arrays(trainer)


def state_arrays(trainer: Any) -> Dict[str, Any]:
    """The whole weights and other tensors, as arrays. To be called by every rank."""
    if isinstance(trainer, DeepSpeedTrainer):
        state_dict = full_parameters.full_state_dict(trainer.wrapped_model.shards, keep=True)
        assert state_dict is not None
    else:
        state_dict = trainer.model.state_dict()
    tensors = {k: v for k, v in state_dict.items() if isinstance(v, torch.Tensor)}
    return {key: _as_array(value.detach()) for key, value in tensors.items()}


def _as_array(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
