"""Trains with this package's trainer, from the weights that TRL's has begun with."""

from pathlib import Path
from typing import Any, List, Optional

import torch
from allennlp.data import Batch, Vocabulary

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMReader
from evidence.chat_templates.cases import ALL, BATCH_SIZE, Case
from evidence.chat_templates.trl_training import LEARNING_RATE
from evidence.harness.steps_beside import StepLosses, Trained, Weights, read_step_losses
from tests.support.side_by_side import Side, trained

_STEPS_PER_CHECKPOINT = 3


def train(
    case: Case, base: str, training_template: Optional[str], initial: Weights, directory: Path
) -> Trained:
    loss_on = "all" if case.data == ALL else "responses"
    template = training_template if case.has_marks else None
    reader = CausalLMReader(
        base, loss_on=loss_on, max_length=case.max_length, chat_template=template
    )
    vocab = Vocabulary()
    instances = [reader.text_to_instance(**record) for record in case.records()]
    fields: List[Any] = [instance["input_ids"] for instance in instances]
    batches: List[Any] = []
    for i in range(0, len(instances), BATCH_SIZE):
        batch = Batch(instances[i : i + BATCH_SIZE])
        batch.index_instances(vocab)
        batches.append(batch.as_tensor_dict())

    def model() -> CausalLM:
        constructed = CausalLM(vocab, model_name=base, lora=case.lora)
        weights = {name: torch.from_numpy(weight) for name, weight in initial.items()}
        constructed.transformer.load_state_dict(weights, strict=case.lora is not None)
        return constructed

    def side(killed_after: Optional[int] = None) -> Side:
        return Side(
            model,
            lambda rank: batches[rank :: case.world_size],
            case.stage,
            case.world_size,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            callbacks=lambda: [StepLosses(directory, killed_after)],
            num_epochs=1,
            num_gradient_accumulation_steps=case.accumulation,
            checkpointer=DeepSpeedCheckpointer(
                directory, save_every_num_batches=_STEPS_PER_CHECKPOINT
            ),
        )

    if case.killed_after is not None:
        _train_until_killed(side(case.killed_after), directory)
    weights = side().on_all_ranks(trained, directory)[0]
    return Trained(
        read_step_losses(directory, case.world_size),
        {name.removeprefix("transformer."): weight for name, weight in weights.items()},
        [field.tensor.tolist() for field in fields],
    )


def _train_until_killed(side: Side, directory: Path) -> None:
    try:
        side.on_all_ranks(trained, directory)
    except AssertionError:  # of the exit codes
        if any(directory.glob("checkpoint_*")):
            return
    raise RuntimeError("The workers weren't killed after a checkpoint.")
