"""`DeepSpeedTrainer` constructed in Python, in one process, with its lifetime."""

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from allennlp.nn.regularizers import L2Regularizer
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import PearsonCorrelation
from allennlp.training.moving_average import ExponentialMovingAverage

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.engine.process.single_process import as_single_process
from tests.support.experiment import assert_same_weights, load_config
from tests.support.side_by_side import Side
from tests.support.tensor_memory import TensorMemory

STAGE_3: Dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
}


class Task:
    """A model and its data, the same each time."""

    def __init__(self, *overrides: Dict[str, Any]) -> None:
        params = Params(load_config("classifier", *overrides))
        prepare_environment(params)
        with as_single_process():
            # Of all data, where there are several workers that each read a share.
            everything = DatasetReader.from_params(params.duplicate()["dataset_reader"])
            vocab = Vocabulary.from_instances(everything.read(params["train_data_path"]))
        reader = DatasetReader.from_params(params.pop("dataset_reader"))
        self.data_loader, self.validation_data_loader = (
            DataLoader.from_params(
                Params({"batch_size": 6, "shuffle": False}),
                reader=reader,
                data_path=params.pop(path),
            )
            for path in ("train_data_path", "validation_data_path")
        )
        self.data_loader.index_with(vocab)
        self.validation_data_loader.index_with(vocab)
        self.model: Model = Model.from_params(params.pop("model"), vocab=vocab)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def arguments(self, directory: Path) -> Dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "data_loader": self.data_loader,
            "validation_data_loader": self.validation_data_loader,
            "num_epochs": 2,
            "cuda_device": -1,
            "serialization_dir": directory,
            "enable_default_callbacks": False,
        }


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_step_and_a_second_one_the_training(tmp_path: Path, times: int):
    class PressCtrlC(TrainerCallback):
        has_returned = False

        def on_batch(self, trainer, *args, **kwargs) -> None:
            # Once, for the losses are read steps later.
            for _ in range(0 if self.has_returned else times):
                signal.raise_signal(signal.SIGINT)
            self.has_returned = True

    task = Task()
    callback = PressCtrlC(str(tmp_path))
    checkpointer = DeepSpeedCheckpointer(tmp_path, save_on_preemption=True)
    trainer = DeepSpeedTrainer(
        **task.arguments(tmp_path), callbacks=[callback], checkpointer=checkpointer
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback.has_returned == (times == 1)
    assert len(list(tmp_path.glob("checkpoint_e0_*"))) == (times == 1)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert not dist.is_initialized()


def test_an_engine_in_a_session_outlives_training(tmp_path: Path):
    task = Task()
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=STAGE_3)
    with trainer.session():
        trainer.train()
        assert dist.is_initialized()
        batch = next(iter(task.data_loader))
        assert trainer.engine(**batch)["logits"].shape == (6, 3)
        # Nobody would have reduced the gradients.
        with pytest.raises(RuntimeError):
            trainer.engine.step()
        # This metric refuses to work where AllenNLP believes that there are several processes.
        metric = PearsonCorrelation()
        metric(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 4.0, 8.0]))
        assert metric.get_metric() == pytest.approx(1.0)
    assert not dist.is_initialized()


def test_the_former_name_of_accumulation_steps_warns_and_names_the_new_one(tmp_path: Path):
    arguments = Task().arguments(tmp_path)
    trainer = DeepSpeedTrainer(**arguments, num_gradient_accumulation_steps=3)
    with pytest.warns(FutureWarning, match="num_gradient_accumulation_steps"):
        assert trainer.group_size == trainer.num_gradient_accumulation_steps == 3
    trainer.close()


def test_deepspeed_constructs_and_steps_optimizer_and_scheduler(tmp_path: Path):
    task = Task()
    arguments = {**task.arguments(tmp_path), "optimizer": None}
    trainer = DeepSpeedTrainer(
        **arguments,
        deepspeed_config={
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2},
            },
        },
    )
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    with trainer.session():
        trainer.train()
        steps = 2 * len(task.data_loader)
        assert trainer.engine.global_steps == steps
        assert trainer.engine.lr_scheduler.total_num_steps == steps
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=0.02)


class _LossOnly(Model):
    """Asks for no host synchronisation itself."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self._embedding = torch.nn.Embedding(vocab.get_vocab_size(), 4)

    def forward(self, tokens, label) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self._embedding(tokens["tokens"]["tokens"]).pow(2).mean()}


@pytest.mark.parametrize(
    "mode, offload, stage",
    [*(("auto", "none", stage) for stage in range(4)), ("step", "cpu", 2), ("step", "none", 3)],
)
def test_one_process_accumulates_gradients(tmp_path: Path, mode: str, offload: str, stage: int):
    weights = []
    for trainer_class in (GradientDescentTrainer, DeepSpeedTrainer):
        task = Task()
        arguments = {**task.arguments(tmp_path), "num_gradient_accumulation_steps": 3}
        if trainer_class is DeepSpeedTrainer:
            zero = {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {"device": offload},
            }
            arguments["deepspeed_config"] = {"zero_optimization": zero}
            arguments["gradient_synchronization"] = mode
        trainer_class(**arguments).train()
        weights.append(task.model.state_dict())
    assert_same_weights(weights[1], weights[0])


class _Weight(Model):
    """A single weight, whose gradient is what it is multiplied with."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, gradient: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.weight * gradient).sum()}


@pytest.mark.parametrize("stage, mode", [(1, "step"), (2, "micro_batch"), (3, "step")])
@pytest.mark.parametrize("accumulation_type, expected", [("bf16", 1.0), ("fp32", 1.015625)])
def test_gradients_are_accumulated_in_the_type_that_the_config_names(
    stage: int, mode: str, accumulation_type: str, expected: float
):
    # Each of the small ones is lost when it is added to 1 in bf16. Together they are not.
    gradients = [1.0] + 8 * [2.0**-9] + 7 * [0.0]
    side = Side(
        lambda: _Weight(Vocabulary()),
        lambda rank: [{"gradient": torch.full((8,), gradient)} for gradient in gradients],
        stage,
        optimizer=partial(torch.optim.SGD, lr=1.0 * len(gradients)),
        num_epochs=1,
        num_gradient_accumulation_steps=len(gradients),
        gradient_synchronization=mode,
        deepspeed_config={
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": accumulation_type},
        },
    )
    assert side.train()["weight"].tolist() == 8 * [-expected]


class _Layers(Model):
    """Four weights, each of which multiplies the loss. Sees what gradients there are."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16)) for _ in "1234"])
        self.gradients: List[Any] = []

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        gradients = [layer.grad for layer in self.layers]
        self.gradients.append([None if grad is None else grad.tolist() for grad in gradients])
        return {"loss": torch.stack([layer.mean() for layer in self.layers]).prod()}


def _gradients_before_forward_passes(trainer: Any) -> Any:
    trainer.train()
    return trainer.model.gradients


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mode", ["micro_batch", "step"])
def test_only_accumulated_gradients_take_memory_between_micro_batches(stage: int, mode: str):
    side = Side(
        _Layers,
        lambda rank: [{"inputs": torch.ones(1)}] * 4,
        stage,
        num_epochs=1,
        num_gradient_accumulation_steps=4,
        gradient_synchronization=mode,
    )
    (gradients,) = side.on_all_ranks(_gradients_before_forward_passes)
    for i, of_layers in enumerate(gradients):
        is_held = mode == "step" and i > 0
        assert of_layers == 4 * [16 * [i / 64] if is_held else None]


def test_the_progress_bar_ends_with_the_metrics_of_the_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    descriptions = []
    for trainer_class in (GradientDescentTrainer, DeepSpeedTrainer):
        task = Task()
        arguments = {**task.arguments(tmp_path), "num_epochs": 1, "validation_data_loader": None}
        trainer_class(**arguments).train()
        bars = capsys.readouterr().err.split("\r")
        (last,) = {bar.split("||: 100%")[0] for bar in bars if "||: 100%" in bar}
        descriptions.append(last)
    assert "loss: " in descriptions[0]
    assert descriptions[0] == descriptions[1]


def test_metrics_that_a_callback_keeps_stay_those_of_their_step(tmp_path: Path):
    kept: List[Dict[str, float]] = []
    expected: List[Dict[str, float]] = []

    class Keep(TrainerCallback):
        def on_batch(self, trainer, batch_inputs, batch_outputs, batch_metrics, *args, **kwargs):
            if kwargs["is_training"]:
                kept.append(batch_metrics)

    class Look(TrainerCallback):
        def on_batch(self, trainer, batch_inputs, batch_outputs, batch_metrics, *args, **kwargs):
            if kwargs["is_training"]:
                expected.append(dict(batch_metrics))

    for callback in (Keep, Look):
        task = Task()
        DeepSpeedTrainer(**task.arguments(tmp_path), callbacks=[callback(str(tmp_path))]).train()
    assert len(kept) > 4 and len({metrics["loss"] for metrics in expected}) > 4
    assert kept == expected


@pytest.mark.parametrize("stage, log_every_num_steps", [(0, 1), (2, 3)])
def test_the_host_waits_for_the_device_only_where_it_reads_the_losses(
    tmp_path: Path, stage: int, log_every_num_steps: int
):
    task = Task()
    task.model = _LossOnly(task.model.vocab)
    task.optimizer = torch.optim.Adam(task.model.parameters())
    waits_of_steps: List[int] = []
    num_waits = 0

    class CountWaits(TrainerCallback):
        """Doesn't look into the metrics."""

        def on_batch(self, *args: Any, is_training: bool, **kwargs: Any) -> None:
            if is_training:
                waits_of_steps.append(num_waits)

    trainer = DeepSpeedTrainer(
        **{**task.arguments(tmp_path), "num_epochs": 1, "validation_data_loader": None},
        num_gradient_accumulation_steps=3,
        log_every_num_steps=log_every_num_steps,
        callbacks=[CountWaits(str(tmp_path))],
        deepspeed_config={"zero_optimization": {"stage": stage}},
    )

    def counting(method: str):
        original = getattr(torch.Tensor, method)

        def counted(tensor: torch.Tensor):
            nonlocal num_waits
            num_waits += _is_called_by_the_loop()
            return original(tensor)

        return mock.patch.object(torch.Tensor, method, counted)

    with counting("item"), counting("tolist"), counting("__bool__"), counting("__float__"):
        trainer.train()
    waits = [after - before for before, after in zip([0, *waits_of_steps], waits_of_steps)]
    assert len(waits) > 4
    for step, num_waits_of_step in enumerate(waits, start=1):
        assert (num_waits_of_step > 0) == (step % log_every_num_steps == 0)


def _is_called_by_the_loop() -> bool:
    """What DeepSpeed's step and PyTorch's optimizers wait for, they do in any loop."""
    caller = Path(sys._getframe(2).f_code.co_filename)
    return not {"deepspeed", "optim"} & set(caller.parts)


def test_a_moving_average_is_not_added_to_a_training_that_goes_on(tmp_path: Path) -> None:
    first = Task()
    checkpointer = DeepSpeedCheckpointer(tmp_path)
    DeepSpeedTrainer(**first.arguments(tmp_path), checkpointer=checkpointer).train()
    again = Task()
    trainer = DeepSpeedTrainer(
        **again.arguments(tmp_path),
        checkpointer=DeepSpeedCheckpointer(tmp_path),
        moving_average=ExponentialMovingAverage(again.model.named_parameters()),
    )
    with pytest.raises(ConfigurationError, match="has no state for 'trainer.moving_average'"):
        trainer.train()
    assert not dist.is_initialized()


class ViewsAsLosses(Model):
    """Each of its losses is an element of a large tensor."""

    num_elements = 10**5

    def __init__(self) -> None:
        regularizer = RegularizerApplicator([("weight", L2Regularizer(0.1))])
        super().__init__(Vocabulary(), regularizer)
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, factor: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        losses = self.weight.sum() * factor.expand(self.num_elements).clone()
        of_sum = losses.sum().expand(self.num_elements).clone()
        return {"loss": losses[0], "first_loss": losses[1], "second_loss": of_sum.detach()[-1]}

    def get_regularization_penalty(self) -> torch.Tensor:
        return self.weight.square().sum().expand(self.num_elements).clone()[3]


def test_losses_that_have_not_been_read_take_the_memory_of_numbers(tmp_path: Path) -> None:
    side = Side(
        ViewsAsLosses,
        lambda rank: [{"factor": torch.tensor(0.1)}] * 12,
        stage=0,
        num_epochs=1,
        log_every_num_steps=100,
        num_gradient_accumulation_steps=2,
    )
    trainer = side.construct(0, tmp_path)
    with TensorMemory() as memory:
        trainer.train()
    # Of two micro-batches: four tensors each, and their gradients.
    assert memory.peak < 2 * (4 + 4) * 4 * ViewsAsLosses.num_elements
