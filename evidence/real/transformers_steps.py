"""
Records the steps of the trainers that are built on transformers'.
"""

import os
from typing import Any, Dict

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback

from evidence.real.recorder import Cell, Recorder


def arguments(cell: Cell, with_deepspeed: bool = True) -> Dict[str, Any]:
    """The arguments of `TrainingArguments` that all have in common."""
    if with_deepspeed:
        _start_deepspeed()
    return {
        "output_dir": cell.output,
        # With it, transformers would leave DeepSpeed out.
        "use_cpu": not with_deepspeed and not torch.cuda.is_available(),
        "deepspeed": cell.deepspeed_config() if with_deepspeed else None,
        "per_device_train_batch_size": cell.batch_size,
        "gradient_accumulation_steps": cell.accumulation,
        "max_steps": cell.total,
        "learning_rate": 1e-5,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "bf16": False,  # TRL's default is `True`
        "report_to": "none",
        "accelerator_config": {"use_configured_state": with_deepspeed},
    }


def _start_deepspeed() -> None:
    import deepspeed

    # An all-reduce for inference on CPUs, which DeepSpeed would compile now.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # By itself, Accelerate knows no backend of DeepSpeed on CPUs, and gives all data to each rank.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="nccl" if torch.cuda.is_available() else "gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]


def train(trainer: Trainer) -> None:
    """Trains, and writes the model, as examples of transformers end."""
    recording = _Recording(trainer)
    trainer.add_callback(recording)
    training_step = trainer.training_step

    def recorded_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = training_step(*args, **kwargs)
        # It is the part of the step's loss that a micro-batch adds.
        recording.recorder.loss(loss * trainer.args.gradient_accumulation_steps)
        return loss

    trainer.training_step = recorded_step
    trainer.train()
    trainer.save_model()
    # Otherwise a worker can abort at its exit.
    trainer.accelerator.end_training()


class _Recording(TrainerCallback):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.args.deepspeed is not None:
            _check_engine(self.trainer)
        self.recorder = Recorder(lambda: self.trainer._save_checkpoint(self.trainer.model, None))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.recorder.step()


def _check_engine(trainer: Trainer) -> None:
    from deepspeed import DeepSpeedEngine

    engine = trainer.model_wrapped
    if not isinstance(engine, DeepSpeedEngine) or engine.world_size != Cell.read().world_size:
        raise RuntimeError(f"It trains a {type(engine).__name__}, and not DeepSpeed's engine.")
