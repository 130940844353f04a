"""
Brings what DeepSpeed reports into AllenNLP's log: the records of its own logger, and what its
timers and profilers print.
"""

import io
import logging
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any, Dict, Iterator
from unittest import mock

import deepspeed
import deepspeed.runtime.utils
import deepspeed.utils.logging
import torch
from allennlp.training.callbacks import TrainerCallback
from deepspeed.profiling.flops_profiler import profiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.timer import ThroughputTimer
from overrides import overrides
from torch.nn.utils.rnn import PackedSequence

from allennlp_deepspeed.engine.shards import whole_shape

logger = logging.getLogger(__name__)

# The modules of DeepSpeed's that print what an engine reports while it trains: times, memory.
_PRINTING_MODULES = (deepspeed.utils.logging, deepspeed.runtime.utils)


@contextmanager
def logged_by_allennlp() -> Iterator[None]:
    """
    Has AllenNLP's handlers write the records of DeepSpeed's logger, each once, in place of its own
    handler for stdout, and what DeepSpeed prints. All of this is global, and as before afterwards,
    as is DeepSpeed's communication logger.

    Mends DeepSpeed 0.19.8: an engine turns the communication logger of the process on, and not off.
    Gone when it is off after the engine has been destroyed.
    """
    deepspeed_logger = deepspeed.utils.logger
    with ExitStack() as undo:
        for module in _PRINTING_MODULES:
            undo.enter_context(mock.patch.object(module, "print", logger.info, create=True))
        undo.enter_context(mock.patch.object(deepspeed_logger, "propagate", True))
        undo.enter_context(mock.patch.object(deepspeed_logger, "handlers", []))
        undo.callback(deepspeed_logger.setLevel, deepspeed_logger.level)
        undo.callback(deepspeed.comm.configure, enabled=False)
        undo.callback(deepspeed.comm.reset_log)
        yield


@contextmanager
def mended_reports(engine: DeepSpeedEngine, is_step_one_batch: bool) -> Iterator[None]:
    """
    Has the engine's reports logged, and makes them true where the trainer says what an optimizer
    step is, and not the engine.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    is_step_one_batch : `bool`, required.
        Whether what the engine takes for a micro-batch is a whole step.
    """
    engine.tput_timer = _StepThroughputTimer(engine, is_step_one_batch)
    if engine.log_level() is None and (
        engine.steps_per_print() is not None or deepspeed.comm.comm.comms_logger.verbose
    ):
        # They are reported at this level, as is much that comes before, while an engine is built.
        deepspeed.utils.logger.setLevel(logging.INFO)
    with ExitStack() as undo:
        if engine.wall_clock_breakdown():
            undo.callback(engine.module.register_forward_hook(_forget_validation(engine)).remove)
        if engine.flops_profiler_enabled():
            undo.callback(engine.register_forward_pre_hook(_start_profile(engine)).remove)
            undo.enter_context(_packed_sequences_profiled())
            _log_flops_profile(engine)
        yield


class _StepThroughputTimer(ThroughputTimer):
    """
    Times whole optimizer steps. DeepSpeed's would begin anew with each micro-batch, take a step for
    one micro-batch, and begin in validation too.
    """

    def __init__(self, engine: DeepSpeedEngine, is_step_one_batch: bool) -> None:
        timer = engine.tput_timer
        super().__init__(timer.config, timer.batch_size, steps_per_output=timer.steps_per_output)
        self._module = engine.module
        self._micro_batch_size = timer.batch_size  # of all ranks
        self._is_step_one_batch = is_step_one_batch
        self._micro_batches = 0
        self._samples = 0  # in `total_elapsed_time`
        # Of the step that has ended last.
        self.micro_batches_in_step = 0

    @overrides
    def start(self) -> None:
        if not self._module.training:
            return
        self._micro_batches += 1
        if not self.started:
            super().start()

    @overrides
    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        self.micro_batches_in_step, self._micro_batches = self._micro_batches, 0
        self.batch_size = self._micro_batch_size
        if not self._is_step_one_batch:
            self.batch_size *= self.micro_batches_in_step
        if self.start_time > 0:
            self._samples += self.batch_size
        super().stop(global_step, report_speed)

    @overrides
    def avg_samples_per_sec(self) -> float:
        return self._samples / self.total_elapsed_time


def _forget_validation(engine: DeepSpeedEngine) -> Any:
    """A hook that keeps the forward passes of a validation out of the times of the next step."""

    def reset_timers(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            for name in engine.engine_timers.forward_timers:
                engine.timers(name).reset()

    return reset_timers


def _start_profile(engine: DeepSpeedEngine) -> Any:
    """
    A hook that starts the flops profiler before the model is called. Nor is there a profile of a
    validation.

    Mends DeepSpeed 0.19.8: the profiler is started in a hook of the model itself, whose own time
    then begins in 1970. Gone when the model of an engine that profiles takes less than a day.
    """
    flops_profiler = engine.flops_profiler
    start_profile = flops_profiler.start_profile
    flops_profiler.start_profile = lambda ignore_list: None

    def start(engine: DeepSpeedEngine, args: Any) -> None:
        is_profiled = engine.global_steps == engine.flops_profiler_profile_step()
        if is_profiled and engine.global_rank == 0 and engine.module.training:
            start_profile()
            _count_partitioned_parameters(engine.module)

    return start


def _count_partitioned_parameters(model: torch.nn.Module) -> None:
    """
    Mends DeepSpeed 0.19.8: the flops profiler takes parameters that ZeRO-3 has partitioned for
    empty. Gone when it counts them.
    """
    for module in model.modules():
        module.__params__ = sum(  # type: ignore[assignment]
            whole_shape(p).numel() for p in module.parameters()
        )


@contextmanager
def _packed_sequences_profiled() -> Iterator[None]:
    """
    Has the flops profiler count RNNs that read a `PackedSequence`, as AllenNLP's encoders have them
    do.

    Mends DeepSpeed 0.19.8: the flops profiler asks a `PackedSequence` for its shape, and fails.
    Gone when an engine that profiles goes forward through an LSTM with one.
    """
    hooks = {}
    for module_type, hook in profiler.MODULE_HOOK_MAPPING.items():
        hooks[module_type] = partial(_count_tokens, hook)
    with mock.patch.dict(profiler.MODULE_HOOK_MAPPING, hooks):
        yield


def _count_tokens(hook: Any, module: torch.nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(inputs[0], PackedSequence):
        # Shape: (1, num_tokens, input_size)
        inputs = (inputs[0].data.unsqueeze(0), *inputs[1:])
    hook(module, inputs, output)


def _log_flops_profile(engine: DeepSpeedEngine) -> None:
    print_model_profile = engine.flops_profiler.print_model_profile

    def log_model_profile(**kwargs: Any) -> None:
        # It has profiled one micro-batch, and would divide by the times of all.
        has_times = engine.wall_clock_breakdown() and engine.tput_timer.micro_batches_in_step == 1
        timed = mock.patch.object(engine, "wall_clock_breakdown", lambda: has_times)
        with timed, _printed_as_one_record():
            print_model_profile(**kwargs)
        if kwargs["output_file"]:
            logger.info("DeepSpeed's flops profile is in %s", kwargs["output_file"])

    engine.flops_profiler.print_model_profile = log_model_profile


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
