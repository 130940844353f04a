"""
Trains a tiny language model on conversations for six steps beside TRL's `SFTTrainer`, with some of
its chat templates, and writes `benchmarks/results/chat_steps.md`. Needs the package `trl`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from allennlp.data import Batch, Vocabulary
from allennlp.training.callbacks import TrainerCallback
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import override

from allennlp_deepspeed.language_modeling import CausalLM, CausalLMReader
from benchmarks.harness import report
from tests.chat_templates.conversations import CONVERSATIONS, Record
from tests.chat_templates.tokenizer import tokenizer_for
from tests.fixtures.tiny_lm import LLAMA
from tests.support.side_by_side import Side, trained

NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 6, 2, 1.0
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-5

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
DORA = {**LORA, "use_dora": True}


class Case(NamedTuple):
    """
    What is trained: a chat template of TRL's, adapters, accumulated batches, stage and workers.
    """

    template: str
    lora: Optional[Dict[str, Any]] = None
    accumulation: int = 1
    stage: int = 0
    world_size: int = 1


CASES = (
    Case("cohere2"),
    Case("gemma3", LORA),
    Case("glm4moe", None, 2, 2, 2),
    Case("lfm2_v2", DORA, 1, 3, 2),
    Case("llama3", LORA, 3),
    Case("phi3", None, 2),
    Case("phi3_5", DORA, 2),
    Case("qwen3_instruct_2507", None, 3, 3),
    Case("qwen3_vl", LORA, 2, 2),
)

KINDS = ("one turn", "two turns", "spaces", "two turns", "one turn")


class Trained(NamedTuple):
    """The loss of each step, and the trained weights by name."""

    losses: List[float]
    weights: Dict[str, torch.Tensor]


def records(case: Case) -> List[Record]:
    """Returns conversations of different lengths, one after the other."""
    made = []
    for i in range(NUM_STEPS * BATCH_SIZE * case.accumulation * case.world_size):
        messages = CONVERSATIONS[KINDS[i % len(KINDS)]]["messages"]
        texts = (f"{message['content']} {'and so on ' * (i % 4)}{i}" for message in messages)
        made.append([{**m, "content": text} for m, text in zip(messages, texts)])
    return [{"messages": messages} for messages in made]


def train_with_trl(case: Case, base: str, directory: Path) -> Tuple[Dict[str, Any], Trained]:
    """Returns the weights before and after."""
    import peft
    from datasets import IterableDataset
    from trl import SFTConfig, SFTTrainer

    settings: Any = {
        "output_dir": str(directory),
        "assistant_only_loss": True,
        "max_length": None,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE * case.world_size,
        "gradient_accumulation_steps": case.accumulation,
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
    }
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=SFTConfig(**settings),
        train_dataset=IterableDataset.from_generator(lambda: iter(records(case))),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=None if case.lora is None else peft.LoraConfig(**case.lora),
    )
    initial = dict(weights_of(trainer.model))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return initial, Trained(losses, dict(weights_of(trainer.model)))


def weights_of(model: torch.nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("base_model.model."), parameter.detach().clone()


class Losses(TrainerCallback):
    """
    Collects the loss of each step, the mean of the weighted losses that callbacks are passed.
    """

    def __init__(self) -> None:
        super().__init__("")
        self.losses: List[float] = []

    @override
    def on_batch(
        self, trainer: Any, batch_inputs: Any, batch_outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        losses = [outputs["loss"].detach() for outputs in batch_outputs]
        self.losses.append(float(torch.stack(losses).mean()))


def train(case: Case, base: str, initial: Dict[str, torch.Tensor]) -> Trained:
    reader, vocab = CausalLMReader(base, loss_on="responses"), Vocabulary()
    instances = [reader.text_to_instance(**record) for record in records(case)]
    batches: List[Any] = []
    for i in range(0, len(instances), BATCH_SIZE):
        batch = Batch(instances[i : i + BATCH_SIZE])
        batch.index_instances(vocab)
        batches.append(batch.as_tensor_dict())

    def model() -> CausalLM:
        constructed = CausalLM(vocab, model_name=base, lora=case.lora)
        constructed.transformer.load_state_dict(initial, strict=case.lora is not None)
        return constructed

    losses = Losses()
    side = Side(
        model,
        lambda rank: batches[rank :: case.world_size],
        case.stage,
        case.world_size,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        callbacks=lambda: [losses],
        num_epochs=1,
        num_gradient_accumulation_steps=case.accumulation,
    )
    ranks = side.on_all_ranks(lambda trainer: (trained(trainer), losses.losses))
    weights = ranks[0][0]
    of_steps = [sum(step) / len(step) for step in zip(*(of_rank for _, of_rank in ranks))]
    of_transformer = {
        name.removeprefix("transformer."): torch.from_numpy(weight)
        for name, weight in weights.items()
    }
    return Trained(of_steps, of_transformer)


def difference(actual: Trained, expected: Trained, initial: Dict[str, torch.Tensor]) -> float:
    """
    Returns the norm of the difference of all weights, divided by that of their change in training.
    """
    differences, changes = (
        torch.stack([(others[name] - weight).norm() for name, weight in expected.weights.items()])
        for others in (actual.weights, initial)
    )
    return float(differences.norm() / changes.norm())


def compare(case: Case, trl: Path, directory: Path) -> List[str]:
    """Returns a row of the table."""
    template = (trl / "chat_templates" / f"{case.template}.jinja").read_text()
    base = tokenizer_for(template, directory / "base")
    torch.manual_seed(11)
    config = {**LLAMA, "vocab_size": 512, "max_position_embeddings": 2048}
    transformer = CausalLM(Vocabulary(), config=config).transformer
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    transformer.save_pretrained(base)
    initial, expected = train_with_trl(case, base, directory / "output")
    actual = train(case, base, initial)
    of_losses = max(abs(a - b) for a, b in zip(actual.losses, expected.losses, strict=True))
    kind = "full" if case.lora is None else "DoRA" if "use_dora" in case.lora else "LoRA"
    figures = [f"{loss:.4f}" for loss in (actual.losses[0], actual.losses[-1])]
    off = difference(actual, expected, initial)
    return [
        case.template,
        kind,
        str(case.accumulation),
        str(case.stage),
        str(case.world_size),
        *figures,
        f"{of_losses:.0e}",
        f"{off:.0e}",
    ]


def main() -> None:
    import trl

    program = "python -m tests.chat_templates.steps"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(compare(case, Path(trl.__file__).parent, Path(directory)))
            print(*rows[-1], flush=True)
    headings = (
        "template",
        "weights",
        "accumulation",
        "stage",
        "workers",
        "first loss",
        "last loss",
        "difference of losses",
        "difference of weights",
    )
    worst = [max(float(row[i]) for row in rows) for i in (-2, -1)]
    text = report.document(
        "Steps beside TRL",
        f"A tiny Llama trains {NUM_STEPS} steps of SGD on conversations with a loss on responses, "
        f"and in one process with the `SFTTrainer` of TRL {trl.__version__} and its "
        "`assistant_only_loss`, from the same weights and with the same conversations, of "
        "different lengths, in each step. The difference of losses is the largest of a step. The "
        "difference of weights is a part of their change in training.",
        report.table(headings, rows),
        f"{report.describe(report.heading(1, 'transformers', 'peft'), with_workers=False)} "
        f"`{program}` runs it again, where `trl` is installed.",
    )
    (arguments.output / "chat_steps.md").write_text(text)
    sys.exit(worst[0] > LOSS_TOLERANCE or worst[1] > WEIGHT_TOLERANCE)


if __name__ == "__main__":
    main()
