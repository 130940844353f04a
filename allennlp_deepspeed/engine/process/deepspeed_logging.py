"""
Redirects DeepSpeed's reports to AllenNLP's log: the records of its own logger, and the output of
its timers.
"""

import io
import logging
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, Dict, Iterator
from unittest import mock

import deepspeed
import deepspeed.runtime.utils
import deepspeed.utils.logging
import torch
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine

logger = logging.getLogger(__name__)

# DeepSpeed's modules that print the reports of an engine in training: times, memory.
_PRINTING_MODULES = (deepspeed.utils.logging, deepspeed.runtime.utils)


@contextmanager
def log_through_allennlp() -> Iterator[None]:
    """
    Context manager in which AllenNLP's handlers write the records of DeepSpeed's logger, each once,
    instead of its own handler for stdout, and the output that DeepSpeed prints. All of this is
    global, and restored at exit.
    """
    deepspeed_logger = deepspeed.utils.logger
    with ExitStack() as undo:
        for module in _PRINTING_MODULES:
            undo.enter_context(mock.patch.object(module, "print", logger.info, create=True))
        undo.enter_context(mock.patch.object(deepspeed_logger, "propagate", True))
        undo.enter_context(mock.patch.object(deepspeed_logger, "handlers", []))
        undo.callback(deepspeed_logger.setLevel, deepspeed_logger.level)
        yield


@contextmanager
def log_reports(engine: DeepSpeedEngine) -> Iterator[None]:
    """Context manager that enables the engine's reports, without counting validation."""
    if engine.log_level() is None and (
        engine.steps_per_print() is not None or deepspeed.comm.comm.comms_logger.verbose
    ):
        # The level of the reports, and of many records before them, while the engine is built.
        deepspeed.utils.logger.setLevel(logging.INFO)
    with ExitStack() as undo:
        if engine.wall_clock_breakdown():
            undo.callback(engine.module.register_forward_hook(_exclude_validation(engine)).remove)
        yield


def _exclude_validation(engine: DeepSpeedEngine) -> Any:
    """
    Returns a hook that excludes the forward passes of validation from the times of the next step.
    """

    def reset_timers(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            for name in engine.engine_timers.forward_timers:
                engine.timers(name).reset()

    return reset_timers


class CommsSummaryCallback(TrainerCallback):
    """
    Logs, on the primary, the records of DeepSpeed's communication logger since the previous epoch.
    Not registered: a `DeepSpeedTrainer` whose `deepspeed_config` enables `comms_logger` has one.
    """

    @override
    def on_epoch(
        self, trainer: Any, metrics: Dict[str, Any], epoch: int, *args: Any, **kwargs: Any
    ) -> None:
        """Logs the summary. Every rank must call it."""
        with _log_prints_as_one_record():
            deepspeed.comm.log_summary()
        deepspeed.comm.reset_log()


@contextmanager
def _log_prints_as_one_record() -> Iterator[None]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    if printed.getvalue():
        logger.info("\n%s", printed.getvalue().strip())
