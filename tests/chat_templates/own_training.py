"""Trains with this package's trainer, from the weights that TRL's has begun with."""

import os
import signal
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from allennlp.data import Batch, Vocabulary
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.language_modeling import CausalLM, CausalLMReader
from tests.chat_templates.cases import ALL, BATCH_SIZE, Case
from tests.chat_templates.trl_training import LEARNING_RATE, Trained, Weights
from tests.support.side_by_side import Side, trained

_STEPS_PER_CHECKPOINT = 3


class Losses(TrainerCallback):
    """
    Writes the number and the loss of each step to a file of the rank. The loss is the mean of the
    weighted losses that callbacks are passed. After a step the process may kill itself.
    """

    def __init__(self, directory: Path, killed_after: Optional[int]) -> None:
        super().__init__(str(directory))
        self._killed_after = killed_after

    @override
    def on_batch(
        self,
        trainer: Any,
        batch_inputs: Any,
        batch_outputs: Any,
        batch_metrics: Any,
        epoch: int,
        batch_number: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        loss = torch.stack([outputs["loss"].detach() for outputs in batch_outputs]).mean()
        with open(_file_of_rank(self.serialization_dir, dist.get_rank()), "a") as file:
            file.write(f"{batch_number} {loss.item()}\n")
        if batch_number == self._killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


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
            callbacks=lambda: [Losses(directory, killed_after)],
            num_epochs=1,
            num_gradient_accumulation_steps=case.accumulation,
            checkpointer=DeepSpeedCheckpointer(
                directory, save_every_num_batches=_STEPS_PER_CHECKPOINT
            ),
        )

    if case.killed_after is not None:
        _train_until_killed(side(case.killed_after), directory)
    weights = side().on_all_ranks(trained, directory)[0]
    of_ranks = [_losses_of_rank(directory, rank) for rank in range(case.world_size)]
    return Trained(
        [field.tensor.tolist() for field in fields],
        [sum(step) / len(step) for step in zip(*of_ranks)],
        {name.removeprefix("transformer."): weight for name, weight in weights.items()},
    )


def _train_until_killed(side: Side, directory: Path) -> None:
    try:
        side.on_all_ranks(trained, directory)
    except AssertionError:  # of the exit codes
        if any(directory.glob("checkpoint_*")):
            return
    raise RuntimeError("The workers weren't killed after a checkpoint.")


def _file_of_rank(directory: Any, rank: int) -> Path:
    return Path(directory, f"losses_{rank}.txt")


def _losses_of_rank(directory: Path, rank: int) -> List[float]:
    """Returns the loss of each step: the last one, if a step was repeated after a recovery."""
    losses: Dict[int, float] = {}
    for line in _file_of_rank(directory, rank).read_text().splitlines():
        number, loss = line.split()
        losses[int(number)] = float(loss)
    return [losses[number] for number in sorted(losses)]
