"""What a trainer leaves behind in the process that has constructed it, however it ends."""

import copy
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, Type
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import ExponentialLearningRateScheduler
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import linear, parameter_offload

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from tests.integration.outside_changes_test import Tokens, token_batches
from tests.integration.trainer_test import Task
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def config_of(stage: int, precision: str = "fp32", offload: bool = False) -> Dict[str, Any]:
    zero: Dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: Dict[str, Any] = {"zero_optimization": zero}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def with_optimizer(name: str) -> Task:
    """A task with two groups, of which the second has the parameters that come first."""
    task = Task()
    parameters = list(task.model.parameters())
    groups = [{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.02}]
    if name == "sgd":
        task.optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)  # type: ignore[assignment]
    else:
        task.optimizer = torch.optim.Adam(groups, lr=0.01)
    return task


def train(
    task: Task, directory: Path, trainer_class: Type[GradientDescentTrainer], **kwargs: Any
) -> GradientDescentTrainer:
    arguments = {**task.arguments(directory), "validation_data_loader": None, **kwargs}
    trainer = trainer_class(**arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "config", [config_of(0), config_of(0, "bf16"), config_of(2, offload=True), config_of(3)]
)
def test_an_optimizer_with_sharded_states_only_resumes(tmp_path: Path, config: Dict[str, Any]):
    has_states = config == config_of(0)
    expected, task = with_optimizer("adam"), with_optimizer("adam")
    kinds = {"deepspeed_config": config, "validation_data_loader": None}
    for each, num_epochs in ((expected, 2), (task, 1)):
        arguments = {**each.arguments(tmp_path / str(num_epochs)), **kinds}
        checkpointer = DeepSpeedCheckpointer(tmp_path / str(num_epochs))
        arguments.update(num_epochs=num_epochs, checkpointer=checkpointer)
        DeepSpeedTrainer(**arguments).train()

    if not has_states:
        with pytest.raises(RuntimeError, match="has been used already"):
            task.optimizer.step()
        with pytest.raises(ConfigurationError, match="has been used already"):
            train(task, tmp_path / "new", DeepSpeedTrainer, deepspeed_config=config)
    DeepSpeedTrainer(**{**arguments, "num_epochs": 2}).train()
    assert_same_weights(task.model.state_dict(), expected.model.state_dict(), tolerance=1e-6)


@pytest.mark.parametrize("stage", [0])
def test_an_optimizer_that_steps_the_parameters_goes_on_in_another_training(
    tmp_path: Path, stage: int
):
    expected, task = with_optimizer("adam"), with_optimizer("adam")
    for i in range(2):
        train(expected, tmp_path / f"plain_{i}", GradientDescentTrainer, num_epochs=1)
        config = {"deepspeed_config": config_of(stage)}
        train(task, tmp_path / f"ours_{i}", DeepSpeedTrainer, num_epochs=1, **config)
    assert_same_weights(task.model.state_dict(), expected.model.state_dict())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_has_made_steps_elsewhere_only_resumes(tmp_path: Path, stage: int):
    task = with_optimizer("adam")
    train(task, tmp_path, GradientDescentTrainer, num_epochs=1)
    states = copy.deepcopy(task.optimizer.state_dict())
    with pytest.raises(ConfigurationError, match="has been used already"):
        train(task, tmp_path, DeepSpeedTrainer, deepspeed_config=config_of(stage))
    torch.testing.assert_close(task.optimizer.state_dict(), states)
    train(task, tmp_path, DeepSpeedTrainer, deepspeed_config=config_of(0), num_epochs=1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_keeps_the_learning_rates_of_a_resumed_training(tmp_path: Path, stage: int):
    for num_epochs in (1, 3):
        task = with_optimizer("sgd")
        DeepSpeedTrainer(
            **{**task.arguments(tmp_path), "num_epochs": num_epochs},
            checkpointer=DeepSpeedCheckpointer(tmp_path),
            deepspeed_config=config_of(stage),
            learning_rate_scheduler=ExponentialLearningRateScheduler(task.optimizer, gamma=0.5),
        ).train()
    rates = [group["lr"] for group in task.optimizer.param_groups]
    assert rates == pytest.approx([0.5 / 8, 0.02 / 8])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_behind_an_empty_one_keep_their_learning_rates(tmp_path: Path, stage: int):
    task = with_optimizer("sgd")
    groups = [{"params": [], "lr": 0.7}, *task.optimizer.param_groups]
    task.optimizer = torch.optim.SGD(groups, lr=0.1)  # type: ignore[assignment]
    train(task, tmp_path, DeepSpeedTrainer, deepspeed_config=config_of(stage))
    assert [group["lr"] for group in task.optimizer.param_groups] == [0.7, 0.5, 0.02]


def test_a_trainer_trains_once(tmp_path: Path):
    task = with_optimizer("sgd")
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=config_of(2))
    with trainer.session():
        trainer.train()
        with pytest.raises(RuntimeError, match="Construct a new trainer"):
            trainer.train()
    for use in (trainer.train, trainer.session().__enter__, lambda: trainer.engine):
        with pytest.raises(RuntimeError, match="Construct a new trainer"):
            use()
    assert not dist.is_initialized()


class _Snapshot:
    """What must not have changed in this process, its model and its optimizer."""

    def __init__(self, task: Task) -> None:
        self._environment = dict(os.environ)
        self._task = task
        self._parameters = dict(task.model.named_parameters())
        self._weights = copy.deepcopy(task.model.state_dict())
        self._groups = [dict(group) for group in task.optimizer.param_groups]

    def assert_plain(self, refuses_steps: bool = False) -> None:
        model, optimizer = self._task.model, self._task.optimizer
        assert not dist.is_initialized()
        assert dict(os.environ) == self._environment
        assert "forward" not in vars(model)
        for name, parameter in model.named_parameters():
            assert parameter is self._parameters[name]
            assert parameter.dtype == torch.float32
            assert parameter.shape == self._weights[name].shape
            assert not vars(parameter) and not parameter._post_accumulate_grad_hooks
        for module in model.modules():
            assert type(module._parameters) is dict
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not module._backward_hooks and not module._backward_pre_hooks
        assert len(optimizer._optimizer_step_pre_hooks) == refuses_steps
        assert len(optimizer.param_groups) == len(self._groups)
        for group, before in zip(optimizer.param_groups, self._groups):
            assert all(p is q for p, q in zip(group["params"], before["params"], strict=True))

    def assert_untrained(self) -> None:
        self.assert_plain()
        assert_same_weights(self._task.model.state_dict(), self._weights, tolerance=0)
        assert not self._task.optimizer.state


CONFIGS = [config_of(0), config_of(2), config_of(3, "bf16")]


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_the_cell_that_constructs_a_trainer_may_be_run_twice(
    tmp_path: Path, config: Dict[str, Any]
):
    expected = with_optimizer("sgd")
    train(expected, tmp_path / "expected", DeepSpeedTrainer, deepspeed_config=config)

    task = with_optimizer("sgd")
    before = _Snapshot(task)
    arguments = {**task.arguments(tmp_path), "validation_data_loader": None}
    trainers = [DeepSpeedTrainer(**arguments, deepspeed_config=config) for _ in range(2)]
    trainers[1].train()
    before.assert_plain(refuses_steps=config != config_of(0))
    assert_same_weights(task.model.state_dict(), expected.model.state_dict(), tolerance=0)
    with pytest.raises(RuntimeError, match="Construct a new trainer"):
        trainers[0].train()


def functions_of_the_process() -> Dict[str, Any]:
    return {
        "linear": torch.nn.functional.linear,
        "linear of stage 3": linear.LinearFunctionForZeroStage3,
        "read parameters": parameter_offload.register_external_parameter,
        "autocast": torch_autocast.TORCH_AUTOCAST_INITIALIZED,
    }


@pytest.mark.parametrize("stage, precision", [(2, {"fp16": {"enabled": True}}), (3, AUTOCAST)])
def test_a_trainer_that_goes_takes_nothing_from_another(
    tmp_path: Path, stage: int, precision: Dict[str, Any]
):
    before = functions_of_the_process()
    arguments = (partial(Tokens, has_max_norm=False), token_batches, stage)
    expected = Side(*arguments, deepspeed_config=precision).construct(0, tmp_path)
    expected.train()
    assert functions_of_the_process() == before

    other, trainer = (
        Side(*arguments, deepspeed_config=precision).construct(0, tmp_path) for _ in range(2)
    )
    other.close()  # type: ignore[attr-defined]
    trainer.train()
    assert_same_weights(trainer.model.state_dict(), expected.model.state_dict(), tolerance=0)
    assert functions_of_the_process() == before


def test_a_trainer_that_goes_leaves_activations_of_another_checkpointed(tmp_path: Path):
    trainers = []
    for _ in range(2):
        task = Task()
        trainers.append(
            DeepSpeedTrainer(
                **task.arguments(tmp_path), activation_checkpointing=["_classification_layer"]
            )
        )
    trainers[0].close()
    assert checkpointing.is_configured()
    trainers[1].close()
    assert not checkpointing.is_configured()


def test_a_model_keeps_a_forward_pass_of_its_own(tmp_path: Path):
    task = Task()
    forward = task.model.forward
    task.model.forward = lambda **inputs: forward(**inputs)  # type: ignore[method-assign]
    own = task.model.forward
    DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=config_of(2, "bf16")).close()
    assert task.model.forward is own


class FailInSecondEpoch(TrainerCallback):
    """After a step, or before one with a graph that is never gone back through."""

    reads_gradients = False

    def __init__(self, serialization_dir: str, where: str, error: Type[BaseException]) -> None:
        super().__init__(serialization_dir)
        self._where = where
        self._error = error

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        self._fail("on_batch", trainer)

    def on_backward(self, trainer, *args: Any, **kwargs: Any) -> bool:
        self._fail("on_backward", trainer)
        return False

    def _fail(self, where: str, trainer: Any) -> None:
        if where == self._where and trainer._epochs_completed == 1:
            raise self._error("on purpose")


@pytest.mark.parametrize(
    "config, where, error",
    [
        (CONFIGS[0], "on_backward", ValueError),
        (CONFIGS[1], "on_batch", KeyboardInterrupt),
        (CONFIGS[2], "on_backward", ValueError),
    ],
)
def test_a_training_that_fails_leaves_what_it_has_trained(
    tmp_path: Path, config: Dict[str, Any], where: str, error: Type[BaseException]
):
    expected = with_optimizer("adam")
    num_steps = len(expected.data_loader) + (where == "on_batch")
    expected.data_loader.batches_per_epoch = num_steps
    train(expected, tmp_path, DeepSpeedTrainer, num_epochs=1, deepspeed_config=config)

    task = with_optimizer("adam")
    before = _Snapshot(task)
    callback = FailInSecondEpoch(str(tmp_path), where, error)
    with pytest.raises(error, match="on purpose"):
        train(task, tmp_path, DeepSpeedTrainer, deepspeed_config=config, callbacks=[callback])
    before.assert_plain(refuses_steps=config != config_of(0))
    assert_same_weights(task.model.state_dict(), expected.model.state_dict(), tolerance=0)
    torch.testing.assert_close(task.optimizer.state_dict(), expected.optimizer.state_dict())


@pytest.mark.parametrize("config", CONFIGS)
def test_a_refused_construction_leaves_nothing(tmp_path: Path, config: Dict[str, Any]):
    task = with_optimizer("adam")
    before = _Snapshot(task)
    # Of ours, before and after there is an engine, and of DeepSpeed's, in the middle.
    with pytest.raises(ConfigurationError, match="patience"):
        DeepSpeedTrainer(**task.arguments(tmp_path), patience=0, deepspeed_config=config)
    before.assert_untrained()
    with pytest.raises(ConfigurationError, match="gradient_synchronization|micro_batch"):
        DeepSpeedTrainer(
            **task.arguments(tmp_path), gradient_synchronization="often", deepspeed_config=config
        )
    before.assert_untrained()
    failing = mock.patch.object(
        DeepSpeedEngine, "_configure_lr_scheduler", side_effect=ValueError("x")
    )
    with failing, pytest.raises(ValueError, match="x"):
        DeepSpeedTrainer(**task.arguments(tmp_path), deepspeed_config=config)
    before.assert_untrained()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path):
    task = Task()
    task.optimizer = torch.optim.Adam(Task().model.parameters())
    with pytest.raises(ConfigurationError, match="isn't in the model"):
        DeepSpeedTrainer(**task.arguments(tmp_path))
    assert not dist.is_initialized()


def test_the_optimizer_that_deepspeed_constructed_says_that_it_is_gone(tmp_path: Path):
    task = Task()
    section = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    config = {**config_of(2), "optimizer": section}
    trainer = train(task, tmp_path, DeepSpeedTrainer, optimizer=None, deepspeed_config=config)
    with pytest.raises(RuntimeError, match="Construct a new optimizer"):
        trainer.optimizer.step()


def train_and_forget(stage: int, directory: Path) -> None:
    train(Task(), directory, DeepSpeedTrainer, num_epochs=1, deepspeed_config=config_of(stage))


def what_is_left() -> Dict[str, int]:
    gc.collect()
    objects = [type(o) for o in gc.get_objects()]
    return {
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in objects),
        "engines": sum(issubclass(kind, DeepSpeedEngine) for kind in objects),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def resident_memory() -> int:
    """In bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_trainings_leave_no_tensors_threads_or_descriptors(tmp_path: Path):
    train_and_forget(3, tmp_path)  # for what is made once in a process
    before = what_is_left()
    for stage in (0, 3, 2, 3):
        train_and_forget(stage, tmp_path)
        assert what_is_left() == before


@pytest.mark.soak
def test_fifty_trainings_grow_by_less_than_5_mb(tmp_path: Path):
    for stage in range(4):
        train_and_forget(stage, tmp_path)
    before, memory_before = what_is_left(), resident_memory()
    for i in range(50):
        train_and_forget(i % 4, tmp_path)
    assert what_is_left() == before
    assert resident_memory() - memory_before < 5 * 1000**2
