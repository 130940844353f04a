"""Trains with TRL's `SFTTrainer`."""

from pathlib import Path
from typing import Any, Iterator, Tuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from evidence.chat_templates.cases import BATCH_SIZE, MESSAGES, NUM_STEPS, Case
from evidence.harness import steps_beside
from evidence.harness.steps_beside import Trained, Weights
from tests.support.workers import run_workers

LEARNING_RATE = 1.0
SEED = 11


def train_with_trl(case: Case, base: str, directory: Path) -> Tuple[Weights, Trained]:
    """Returns the weights before the training, and what it has trained, in forked workers."""
    return run_workers(case.trl_workers, lambda rank: _train(case, base, directory, rank))[0]


def _train(case: Case, base: str, directory: Path, rank: int) -> Tuple[Weights, Trained]:
    import peft
    from datasets import IterableDataset
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(SEED)
    settings: Any = {
        **steps_beside.training_arguments(directory, NUM_STEPS, LEARNING_RATE),
        "assistant_only_loss": case.data == MESSAGES,
        "max_length": case.max_length,
        "per_device_train_batch_size": BATCH_SIZE * case.world_size // case.trl_workers,
        "gradient_accumulation_steps": case.accumulation,
        # Each worker takes its batches itself: one alone would pad those of all alike.
        "accelerator_config": {"dispatch_batches": False},
        "gradient_checkpointing": False,
        **case.trl,
    }
    records = [
        {{"response": "completion"}.get(key, key): value for key, value in record.items()}
        for record in case.records()
    ]
    with steps_beside.accelerate_worker(rank, case.trl_workers):
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(base),
            args=SFTConfig(**settings),
            train_dataset=IterableDataset.from_generator(lambda: iter(records)),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=None if case.lora is None else peft.LoraConfig(**case.lora),
        )
        steps_beside.check_worker(trainer, case.trl_workers)
        trainer.remove_callback(PrinterCallback)
        initial = dict(_weights_of(trainer.model))
        trainer.train()
    examples = [list(example["input_ids"]) for example in trainer.train_dataset]
    weights = dict(_weights_of(trainer.model))
    return initial, Trained(steps_beside.logged_losses(trainer), weights, examples)


def _weights_of(model: torch.nn.Module) -> Iterator[Tuple[str, np.ndarray]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("base_model.model."), parameter.detach().numpy().copy()
