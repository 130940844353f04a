"""
Trains any AllenNLP model on DeepSpeed's engine, from the config file.

Works around DeepSpeed 0.19.8: its logger writes to the standard output, which is for the output of
our commands. Gone when its logger writes to the standard error.
"""

import contextlib
import sys
from typing import Any

import torch  # noqa: F401  # sets up its logger, which `quiet_import` quietens

from allennlp_deepspeed.announcements import quiet_import, silence_plugin

# Installs the import hook, unless a `.pth` file has.
from allennlp_deepspeed_import_hook import fork_server

# DeepSpeed's logger will write to the stream that is the standard output during the import.
with quiet_import("DeepSpeed", "torch"), contextlib.redirect_stdout(sys.stderr):
    # The fork server imports the same modules at the same time, unless the hook has started it
    # already.
    fork_server.start_for_command()

    import deepspeed  # noqa: F401
    import torch.utils.cpp_extension  # noqa: F401  # DeepSpeed imports it later

from allennlp_deepspeed import allennlp_patches, models
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.commands import DeepSpeed
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import DeepSpeedCheckpointWrapper
from allennlp_deepspeed.engine.process.sequence_groups import reading_by_groups
from allennlp_deepspeed.launch import train_command
from allennlp_deepspeed.metrics import distributed_metrics
from allennlp_deepspeed.reports.profiler_callback import ProfilerCallback
from allennlp_deepspeed.training.deepspeed_train_model import DeepSpeedTrainModel
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer
from allennlp_deepspeed.training_traits import TrainingTraits

__all__ = [
    "DeepSpeed",
    "DeepSpeedCheckpointWrapper",
    "DeepSpeedCheckpointer",
    "DeepSpeedConfig",
    "DeepSpeedTrainModel",
    "DeepSpeedTrainer",
    "ProfilerCallback",
    "TrainingTraits",
    "reading_by_groups",
]


def __getattr__(name: str) -> Any:
    if name == "LoraEmbedder":
        from allennlp_deepspeed.models.lora import LoraEmbedder

        return LoraEmbedder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


allennlp_patches.apply()
silence_plugin()
distributed_metrics.apply()
train_command.install()
models.register()
