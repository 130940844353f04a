"""
Models that generate in validation, where ranks call their modules unequally often.
"""

from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.moving_average import ExponentialMovingAverage
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from allennlp_deepspeed import DeepSpeedTrainer
from tests.support.communication import CommunicationCounter
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Batches, Side, state_arrays

NUM_TOKENS = 23
SIZES: Dict[str, Any] = {"vocab_size": NUM_TOKENS, "d_model": 8, "num_heads": 2}


def t5() -> PreTrainedModel:
    config = T5Config(**SIZES, d_kv=4, d_ff=12, num_layers=1, dropout_rate=0.0)
    config.decoder_start_token_id = config.pad_token_id
    return T5ForConditionalGeneration(config)


def bart() -> PreTrainedModel:
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 12 for part in ("encoder", "decoder")}
    config = BartConfig(**SIZES, **heads, **layers, **widths, dropout=0.0)
    return BartForConditionalGeneration(config)


class Generator(Model):
    """Generates in evaluation, and measures what it has generated."""

    def __init__(self, transformer: Callable[[], PreTrainedModel] = t5) -> None:
        super().__init__(Vocabulary())
        self.transformer = transformer()
        self._sum = 0

    def forward(  # type: ignore[override]
        self, inputs: torch.Tensor, labels: torch.Tensor, num_tokens: int
    ) -> Dict[str, torch.Tensor]:
        loss = self.transformer(input_ids=inputs, labels=labels).loss
        if not self.training:
            self._sum += int(self.generate(inputs, num_tokens).sum())
        return {"loss": loss}

    def generate(self, inputs: torch.Tensor, num_tokens: int) -> torch.Tensor:
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        return self.transformer.generate(input_ids=inputs, num_beams=2, **lengths)

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        metrics = {"sum_of_tokens": float(self._sum)}
        self._sum = 0 if reset else self._sum
        return metrics


def of_rank(rank: int, num_tokens: Any = (3, 7)) -> List[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "inputs": torch.randint(3, NUM_TOKENS, (2, 5), generator=generator),
            "labels": torch.randint(3, NUM_TOKENS, (2, 4), generator=generator),
            "num_tokens": num_tokens[(rank + i) % 2],
        }
        for i in range(2)
    ]


class OfThisRank(Batches):
    """Of which each generates another number of tokens on each rank."""

    def __init__(self, num_tokens: Any = (3, 7)) -> None:
        super().__init__([])
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(of_rank(rank, self._num_tokens))


def numbers(metrics: Dict[str, Any]) -> Dict[str, float]:
    return {k: v for k, v in metrics.items() if "loss" in k or "sum_of_tokens" in k}


def train(trainer: Any) -> Any:
    return numbers(trainer.train()), state_arrays(trainer)


def assert_same_results(actual: List[Any], expected: List[Any]) -> None:
    for (metrics, weights), (expected_metrics, expected_weights) in zip(actual, expected):
        assert metrics == pytest.approx(expected_metrics, abs=1e-5)
        as_tensors = [
            {name: torch.tensor(array) for name, array in arrays.items()}
            for arrays in (weights, expected_weights)
        ]
        assert_same_weights(*as_tensors, tolerance=1e-5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def average(model: Model) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(model.named_parameters(), decay=0.5)


@pytest.mark.parametrize(
    "transformer, world_size, arguments",
    [
        (t5, 1, {}),
        (t5, 2, {"optimizer": adam}),
        (bart, 2, {"moving_average": average}),
    ],
)
def test_validation_is_that_of_gradient_descent_at_stage_3(
    transformer: Callable[[], PreTrainedModel], world_size: int, arguments: Dict[str, Any]
) -> None:
    def results(stage: Optional[int]) -> List[Any]:
        return Side(
            lambda: Generator(transformer),
            of_rank,
            stage,
            world_size,
            validation_data_loader=OfThisRank(),
            **arguments,
        ).on_all_ranks(train)

    assert_same_results(results(3), results(None))


def num_gathers(num_tokens: int, **arguments: Any) -> int:
    """In a validation whose ranks generate as many tokens as one another."""

    def count(trainer: Any) -> int:
        counter = CommunicationCounter()
        validate = trainer._validation_loss

        def count_and_validate(epoch: int) -> Any:
            with counter:
                return validate(epoch)

        trainer._validation_loss = count_and_validate
        trainer.train()
        return sum(t.calls for name, t in counter.read().items() if "gather" in name)

    validation = OfThisRank((num_tokens, num_tokens))
    side = Side(
        Generator, of_rank, 3, 2, validation_data_loader=validation, num_epochs=1, **arguments
    )
    return side.on_all_ranks(count)[0]


def test_the_number_of_gathers_does_not_grow_with_the_tokens() -> None:
    assert num_gathers(3) == num_gathers(6)


@pytest.mark.soak
def test_parameters_are_gathered_for_each_token_where_memory_is_to_be_saved() -> None:
    short, long = (num_gathers(n, reshard_after_micro_batch=True) for n in (3, 6))
    assert long > short > num_gathers(3)


class ChangeInValidation(TrainerCallback):
    """Changes weights after each batch of a validation."""

    def on_batch(self, trainer, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if is_training:
            return
        if isinstance(trainer, DeepSpeedTrainer):
            with trainer.modified_weights("shared"):
                self._change(trainer.model)
        else:
            self._change(trainer.model)

    @torch.no_grad()
    def _change(self, model: Any) -> None:
        model.transformer.get_input_embeddings().weight.mul_(0.5)


def test_weights_that_a_callback_changes_are_those_of_the_next_batch() -> None:
    def results(stage: Optional[int]) -> List[Any]:
        return Side(
            Generator,
            of_rank,
            stage,
            2,
            validation_data_loader=OfThisRank(),
            callbacks=lambda: [ChangeInValidation("")],
        ).on_all_ranks(train)

    assert_same_results(results(3), results(None))


class GenerateOnRank0(TrainerCallback):
    """Generates after each epoch, on one rank."""

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        with trainer.evaluation():
            if dist.get_rank() == 0:
                trainer.model.eval()
                batch = of_rank(0)[0]
                trainer.model.generate(batch["inputs"], batch["num_tokens"])


def test_a_callback_may_generate_on_one_rank() -> None:
    def weights(**arguments: Any) -> Dict[str, torch.Tensor]:
        return Side(Generator, of_rank, 3, 2, **arguments).train()

    assert_same_weights(weights(callbacks=lambda: [GenerateOnRank0("")]), weights(), tolerance=0)
