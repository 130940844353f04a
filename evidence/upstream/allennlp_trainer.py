"""
A pytest plugin that runs AllenNLP's own tests of its trainer with ours. `python -m evidence
upstream` loads it for `tests/training/trainer_test.py` of a checkout of AllenNLP. It leaves out no
test; those that need a GPU skip themselves where there is none, and those of what our trainer
refuses have to fail with the refusal.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from allennlp.training.trainer import TrainerCheckpoint
from typing_extensions import override

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.checkpoint import state_files
from allennlp_deepspeed.checkpoint.trainer_protocol import TrainerProtocol

# These give the trainer the optimizer of another model, or one that another trainer has used and
# without a checkpoint to resume from. Ours refuses both. The tests are about the model or the
# metrics, and an optimizer of the model's own makes no difference to that.
_WITH_OTHER_OPTIMIZER = {
    "test_trainer_can_run",
    "test_trainer_raises_on_model_with_no_loss_key",
    "test_confidence_check_callback",
}

# Histograms of parameters and gradients, which are sharded: 'distribution_interval'.
_REFUSED = {"test_trainer_can_log_batch_inputs", "test_trainer_can_log_histograms"}


class CheckpointerWithLinks(DeepSpeedCheckpointer):
    """
    Links the two names that a checkpoint has in AllenNLP to what there is of each in ours, for
    tests that list checkpoints and remove some: one without its links is removed before any is
    loaded.
    """

    @override
    def finish(self) -> None:
        super().finish()
        for path in Path(self._serialization_dir).iterdir():
            if path.is_symlink():
                path.unlink()
        for point in self._checkpoints.list_checkpoints():
            checkpoint = self._checkpoints.path(point)
            model_state = state_files.file_path(checkpoint, rank=0)
            training_state = self._checkpoints.training_state_path(checkpoint, rank=0)
            os.symlink(model_state, self._model_state_path(*point))
            os.symlink(training_state, self._training_state_path(*point))

    @override
    def load_checkpoint(
        self, trainer: Optional[TrainerProtocol] = None
    ) -> Optional[TrainerCheckpoint]:
        for point in self._checkpoints.list_checkpoints():
            links = (self._model_state_path(*point), self._training_state_path(*point))
            if not all(map(os.path.islink, links)):
                self._checkpoints.remove(point)
        return super().load_checkpoint(trainer)


class RestoresBeforeTraining(DeepSpeedTrainer):
    """
    Restores no checkpoint after training, when its engine has been destroyed. Some tests do, and
    compare the best epoch and its metrics, which a trainer still has then.
    """

    @override
    def _maybe_restore_checkpoint(self) -> None:
        if not self._has_trained or self._ddp_wrapped_model.is_in_use:
            super()._maybe_restore_checkpoint()


def _with_own_optimizer(
    model: Model, optimizer: torch.optim.SGD, *args: Any, **kwargs: Any
) -> DeepSpeedTrainer:
    """Constructs a trainer, with an optimizer like the given one for what is in `model`."""
    if not list(model.parameters()):
        model.weight = torch.nn.Parameter(torch.zeros(1))
    own_optimizer = type(optimizer)(model.parameters(), lr=optimizer.defaults["lr"])
    return RestoresBeforeTraining(model, own_optimizer, *args, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zero-stage", type=int, choices=range(4), default=2)


def pytest_report_header(config: pytest.Config) -> str:
    return f"AllenNLP's tests with DeepSpeedTrainer at ZeRO stage {config.getoption('zero_stage')}"


@pytest.fixture(autouse=True)
def our_trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts our trainer and our checkpointer in the place of AllenNLP's in the test's module."""
    if request.node.originalname in _REFUSED:
        mark = pytest.mark.xfail(raises=ConfigurationError, strict=True, reason="refused by name")
        request.node.add_marker(mark)
    zero: Dict[str, Any] = {"stage": request.config.getoption("zero_stage")}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # the models are small
    keywords: Dict[str, Any] = {
        "deepspeed_config": {"zero_optimization": zero},
        # AllenNLP's trainer asks the checkpointer after each step whether it is time to save.
        "log_every_num_steps": 1,
    }
    has_other_optimizer = request.node.originalname in _WITH_OTHER_OPTIMIZER
    trainer = partial(
        _with_own_optimizer if has_other_optimizer else RestoresBeforeTraining, **keywords
    )
    trainer.from_partial_objects = partial(  # type: ignore[attr-defined]
        RestoresBeforeTraining.from_partial_objects, **keywords
    )
    monkeypatch.setattr(request.module, "GradientDescentTrainer", trainer)
    monkeypatch.setattr(request.module, "Checkpointer", CheckpointerWithLinks)
