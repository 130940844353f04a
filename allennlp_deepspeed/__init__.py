"""
Trains any AllenNLP model on DeepSpeed's engine, from the config file.
"""

import contextlib
import sys

# DeepSpeed logs to what is the standard output when it is imported, which is for what our commands
# print.
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed  # noqa: F401

from allennlp_deepspeed import compat, contrastive
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.commands import DeepSpeed
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.engine.activation_checkpointing import DeepSpeedCheckpointWrapper
from allennlp_deepspeed.launch import find_learning_rate, preflight
from allennlp_deepspeed.lora import LoraEmbedder
from allennlp_deepspeed.reports.communication_callback import CommunicationCallback
from allennlp_deepspeed.training.train_loop import DeepSpeedTrainModel
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer

__all__ = [
    "CommunicationCallback",
    "DeepSpeed",
    "DeepSpeedCheckpointWrapper",
    "DeepSpeedCheckpointer",
    "DeepSpeedConfig",
    "DeepSpeedTrainModel",
    "DeepSpeedTrainer",
    "LoraEmbedder",
    "contrastive",
]

compat.apply()
preflight.install()
find_learning_rate.install()
