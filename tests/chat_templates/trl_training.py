"""Trains with TRL's `SFTTrainer`."""

import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from tests.chat_templates.cases import BATCH_SIZE, MESSAGES, NUM_STEPS, Case
from tests.support.workers import run_workers

LEARNING_RATE = 1.0
SEED = 11

Weights = Dict[str, np.ndarray]


class Trained(NamedTuple):
    """The token ids of each example, the loss of each step, and the trained weights by name."""

    examples: List[List[int]]
    losses: List[float]
    weights: Weights


def train_with_trl(case: Case, base: str, directory: Path) -> Tuple[Weights, Trained]:
    """Returns the weights before the training, and what it has trained, in forked workers."""
    return run_workers(case.trl_workers, lambda rank: _train(case, base, directory, rank))[0]


def _train(case: Case, base: str, directory: Path, rank: int) -> Tuple[Weights, Trained]:
    import peft
    from datasets import IterableDataset
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(SEED)
    settings: Any = {
        "output_dir": str(directory),
        "assistant_only_loss": case.data == MESSAGES,
        "max_length": case.max_length,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE * case.world_size // case.trl_workers,
        "gradient_accumulation_steps": case.accumulation,
        # Each worker takes its batches itself: one alone would pad those of all alike.
        "accelerator_config": {"dispatch_batches": False},
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "logging_first_step": True,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **case.trl,
    }
    records = [
        {{"response": "completion"}.get(key, key): value for key, value in record.items()}
        for record in case.records()
    ]
    # The process group is there already, but Accelerate asks for its address.
    workers = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.trl_workers)),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    }
    with mock.patch.dict(os.environ, workers if case.trl_workers > 1 else {}):
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(base),
            args=SFTConfig(**settings),
            train_dataset=IterableDataset.from_generator(lambda: iter(records)),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=None if case.lora is None else peft.LoraConfig(**case.lora),
        )
        if trainer.accelerator.num_processes != case.trl_workers:
            raise RuntimeError(f"TRL trains with {trainer.accelerator.num_processes} workers.")
        trainer.remove_callback(PrinterCallback)
        initial = dict(_weights_of(trainer.model))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    examples = [list(example["input_ids"]) for example in trainer.train_dataset]
    return initial, Trained(examples, losses, dict(_weights_of(trainer.model)))


def _weights_of(model: torch.nn.Module) -> Iterator[Tuple[str, np.ndarray]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("base_model.model."), parameter.detach().numpy().copy()
