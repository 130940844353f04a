"""
Trains any AllenNLP model on DeepSpeed's engine, from the config file.

Works around DeepSpeed 0.19.8: importing it has it log to the standard output, which is for what our
commands print. Gone when its logger writes to the standard error.
"""

import contextlib
import sys

from allennlp_deepspeed.announcements import imported_quietly

# Installs itself where no `.pth` file has.
from allennlp_deepspeed_import_hook import fork_server

# To what is the standard output now it will log.
with imported_quietly("DeepSpeed", "torch"), contextlib.redirect_stdout(sys.stderr):
    # It imports the same meanwhile, if the hook hasn't started it yet.
    fork_server.start_for_command()

    import deepspeed  # noqa: F401
    import torch.utils.cpp_extension  # noqa: F401  # which DeepSpeed does later

from allennlp_deepspeed import (
    attention,
    compat,
    contrastive,
    distributed_metrics,
    language_modeling,
)
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.commands import DeepSpeed
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.engine.activation_checkpointing import DeepSpeedCheckpointWrapper
from allennlp_deepspeed.engine.sequence_groups import reading_by_groups
from allennlp_deepspeed.launch import preflight
from allennlp_deepspeed.lora import LoraEmbedder
from allennlp_deepspeed.reports.profiler_callback import ProfilerCallback
from allennlp_deepspeed.training.train_model import DeepSpeedTrainModel
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer

__all__ = [
    "DeepSpeed",
    "DeepSpeedCheckpointWrapper",
    "DeepSpeedCheckpointer",
    "DeepSpeedConfig",
    "DeepSpeedTrainModel",
    "DeepSpeedTrainer",
    "LoraEmbedder",
    "ProfilerCallback",
    "attention",
    "contrastive",
    "language_modeling",
    "reading_by_groups",
]

compat.apply()
distributed_metrics.apply()
preflight.install()
