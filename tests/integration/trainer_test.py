"""`DeepSpeedTrainer` constructed in Python, in one process, with its lifetime."""

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Union
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import is_distributed, prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import BasicClassifier, Model
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import PearsonCorrelation
from allennlp.training.moving_average import ExponentialMovingAverage
from allennlp.training.optimizers import AdamOptimizer

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.engine.one_process import as_one_process
from tests.support.experiment import assert_same_weights, load_config

STAGE_3: Dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
}


class Task:
    """A model and its data, the same each time."""

    def __init__(self) -> None:
        params = Params(load_config("classifier"))
        prepare_environment(params)
        with as_one_process():
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, torch.Tensor]:
    task = Task()
    GradientDescentTrainer(**task.arguments(tmp_path_factory.mktemp("reference"))).train()
    return task.model.state_dict()


@pytest.mark.parametrize(
    "deepspeed_config",
    [None, "zero_1", {"zero_optimization": {"stage": 0}}, STAGE_3, "zero_2_offload"],
)
def test_the_same_weights_as_gradient_descent(
    reference: Dict[str, torch.Tensor],
    tmp_path: Path,
    deepspeed_config: Union[None, str, Dict[str, Any]],
):
    task = Task()
    DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=deepspeed_config).train()
    assert_same_weights(task.model.state_dict(), reference)


@pytest.mark.parametrize("deepspeed_config", ["zero_2", STAGE_3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_is_plain_again_after_training(
    tmp_path: Path, deepspeed_config: Union[str, Dict[str, Any]], precision: str
):
    task = Task()
    environment = dict(os.environ)
    if precision == "bf16":
        changes = STAGE_3 if deepspeed_config is STAGE_3 else {"type": deepspeed_config}
        deepspeed_config = {**changes, "bf16": {"enabled": True}}
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=deepspeed_config)
    assert dist.is_initialized()
    trainer.train()

    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}
    assert not any(vars(p) or p._post_accumulate_grad_hooks for p in task.model.parameters())
    assert "forward" not in vars(task.model)
    assert all(type(m._parameters) is dict for m in task.model.modules())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in task.model.modules()
    )
    instance = next(iter(task.data_loader.iter_instances()))
    before = task.model.forward_on_instance(instance)["probs"]
    assert copy.deepcopy(task.model).forward_on_instance(instance)["probs"] == pytest.approx(before)
    # The weights it ends with are the best ones, which are also in the file.
    saved = torch.load(trainer.get_best_weights_path(), weights_only=True)
    assert_same_weights(task.model.state_dict(), saved, tolerance=0)


def test_a_model_can_be_trained_again(tmp_path: Path):
    task = Task()
    DeepSpeedTrainer(**task.arguments(tmp_path / "first"), deepspeed_config=STAGE_3).train()
    task.optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
    before = copy.deepcopy(task.model.state_dict())
    DeepSpeedTrainer(**task.arguments(tmp_path / "second"), deepspeed_config="zero_2").train()
    assert any(not torch.equal(before[k], v) for k, v in task.model.state_dict().items())


def test_a_failed_training_leaves_no_process_group(tmp_path: Path):
    task = Task()
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path))
    failing = mock.patch.object(BasicClassifier, "get_metrics", side_effect=KeyError("on purpose"))
    with failing, pytest.raises(KeyError, match="on purpose"):
        trainer.train()
    assert not dist.is_initialized()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_step_and_a_second_one_the_training(tmp_path: Path, times: int):
    class PressCtrlC(TrainerCallback):
        has_returned = False

        def on_batch(self, trainer, *args, **kwargs) -> None:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            self.has_returned = True

    task = Task()
    callback = PressCtrlC(str(tmp_path))
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path), callbacks=[callback])
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback.has_returned == (times == 1)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert not dist.is_initialized()


def test_a_failed_construction_leaves_no_process_group(tmp_path: Path):
    task = Task()
    environment = dict(os.environ)
    with pytest.raises(ConfigurationError, match="patience"):
        DeepSpeedTrainer(**task.arguments(tmp_path), patience=0)
    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    assert "forward" not in vars(task.model)


def test_allennlp_takes_one_process_for_one_process(tmp_path: Path):
    task = Task()
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path))
    with trainer.session():
        assert dist.is_initialized()
        assert not is_distributed()
        # These metrics refuse to work where AllenNLP believes that there are several processes.
        metric = PearsonCorrelation()
        metric(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 4.0, 8.0]))
        assert metric.get_metric() == pytest.approx(1.0)


def test_an_engine_in_a_session_outlives_training(tmp_path: Path):
    task = Task()
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=STAGE_3)
    with trainer.session():
        trainer.train()
        assert dist.is_initialized()
        batch = next(iter(task.data_loader))
        assert trainer.engine(**batch)["logits"].shape == (6, 3)
    assert not dist.is_initialized()


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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["auto", "step"])
def test_one_process_accumulates_gradients(tmp_path: Path, stage: int, offload: str, mode: str):
    if stage == 0 and offload == "cpu":
        offload = "none"  # there is nothing to offload
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


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mode", ["step", "micro_batch"])
@pytest.mark.parametrize("accumulation_type, expected", [("bf16", 1.0), ("fp32", 1.015625)])
def test_gradients_are_accumulated_in_the_type_that_the_config_names(
    tmp_path: Path, stage: int, mode: str, accumulation_type: str, expected: float
):
    if stage == 1 and mode == "micro_batch":
        mode = "step"  # the only one at this stage
    task = Task()
    task.model = _Weight(task.model.vocab)
    task.optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0)
    trainer = DeepSpeedTrainer(
        **task.arguments(tmp_path),
        num_gradient_accumulation_steps=9,
        gradient_synchronization=mode,
        deepspeed_config={
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": accumulation_type},
        },
    )
    # Each of the small ones is lost when it is added to 1 in bf16. Together they are not.
    gradients = [1.0] + 8 * [2.0**-9]
    with trainer.session():
        trainer._gradients.start_step()
        for i, gradient in enumerate(gradients):
            with trainer._gradients.micro_batch(is_last=i == len(gradients) - 1):
                loss = trainer.engine(torch.full((8,), gradient))["loss"]
                trainer.engine.backward(loss, scale_wrt_gas=False)
        trainer.engine.step()
    assert task.model.weight.tolist() == pytest.approx(8 * [-expected], abs=0)


class _Layers(Model):
    """Four weights of the same size, each of which multiplies the loss."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16)) for _ in "1234"])

    def forward(self) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": torch.stack([layer.mean() for layer in self.layers]).prod()}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("setting", ["micro_batch", "step"])
def test_only_accumulated_gradients_take_memory_between_micro_batches(
    tmp_path: Path, stage: int, setting: str
):
    task = Task()
    task.model = _Layers(task.model.vocab)
    task.optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0)
    trainer = DeepSpeedTrainer(
        **task.arguments(tmp_path),
        num_gradient_accumulation_steps=3,
        gradient_synchronization=setting,
        deepspeed_config={
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
        },
    )
    with trainer.session():
        trainer._gradients.start_step()
        for i in range(3):
            with trainer._gradients.micro_batch(is_last=i == 2):
                trainer.engine.backward(trainer.engine()["loss"], scale_wrt_gas=False)
            for parameter in trainer.model.parameters():
                if i == 2 or setting == "micro_batch":
                    assert parameter.grad is None
                else:
                    assert torch.equal(parameter.grad, torch.full((16,), (i + 1) / 16))
        trainer.engine.step()
    for layer in task.model.layers:
        assert torch.allclose(layer, torch.full((16,), 1 - 3 / 16))


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


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("log_every_num_steps", [1, 3])
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


def test_allennlp_optimizers_are_taken(tmp_path: Path, reference: Dict[str, torch.Tensor]):
    task = Task()
    task.optimizer = AdamOptimizer(list(task.model.named_parameters()), lr=0.01)
    DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config="zero_2").train()
    assert_same_weights(task.model.state_dict(), reference)


def test_a_callback_may_put_its_own_forward_pass_in_the_place_of_the_trainers(
    tmp_path: Path,
) -> None:
    class Doubling(TrainerCallback):
        times_called = 0

        def on_start(self, trainer, **kwargs: Any) -> None:
            original = trainer.batch_outputs

            def batch_outputs(batch: Any, for_training: bool) -> Any:
                self.times_called += for_training
                return original(batch, for_training)

            trainer.batch_outputs = batch_outputs

    callback = Doubling(str(tmp_path))
    trainer = DeepSpeedTrainer(**Task().arguments(tmp_path), callbacks=[callback])
    trainer.train()
    assert callback.times_called == trainer.steps_completed > 0


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
    with pytest.raises(ConfigurationError, match="has nothing of 'trainer.moving_average'"):
        trainer.train()
    assert not dist.is_initialized()
