"""
Brings what DeepSpeed reports into AllenNLP's log: the records of its own logger, and what its
timers print.
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
from overrides import overrides

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine

logger = logging.getLogger(__name__)

# The modules of DeepSpeed's that print what an engine reports while it trains: times, memory.
_PRINTING_MODULES = (deepspeed.utils.logging, deepspeed.runtime.utils)


@contextmanager
def logged_by_allennlp() -> Iterator[None]:
    """
    Has AllenNLP's handlers write the records of DeepSpeed's logger, each once, in place of its own
    handler for stdout, and what DeepSpeed prints. All of this is global, and as before afterwards.
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
def reports_logged(engine: DeepSpeedEngine) -> Iterator[None]:
    """Has the engine's reports logged, without what it counts in validation."""
    if engine.log_level() is None and (
        engine.steps_per_print() is not None or deepspeed.comm.comm.comms_logger.verbose
    ):
        # They are reported at this level, as is much that comes before, while an engine is built.
        deepspeed.utils.logger.setLevel(logging.INFO)
    with ExitStack() as undo:
        if engine.wall_clock_breakdown():
            undo.callback(engine.module.register_forward_hook(_forget_validation(engine)).remove)
        yield


def _forget_validation(engine: DeepSpeedEngine) -> Any:
    """A hook that keeps the forward passes of a validation out of the times of the next step."""

    def reset_timers(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            for name in engine.engine_timers.forward_timers:
                engine.timers(name).reset()

    return reset_timers


class CommsSummaryCallback(TrainerCallback):
    """
    Logs, on the primary, what DeepSpeed's communication logger has recorded since the epoch before.
    Not registered: a `DeepSpeedTrainer` whose `deepspeed_config` enables `comms_logger` has one.
    """

    @overrides
    def on_epoch(
        self, trainer: Any, metrics: Dict[str, Any], epoch: int, *args: Any, **kwargs: Any
    ) -> None:
        """To be called by every rank."""
        with _printed_as_one_record():
            deepspeed.comm.log_summary()
        deepspeed.comm.reset_log()


@contextmanager
def _printed_as_one_record() -> Iterator[None]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    if printed.getvalue():
        logger.info("\n%s", printed.getvalue().strip())
