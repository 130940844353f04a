"""
Workers that share sequences train as a single process does with the same batches.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.common import Lazy, Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.data.dataset_readers import BabiReader
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedCheckpointer, reading_by_groups
from allennlp_deepspeed.extensions.sequence_parallelism import SequenceParallelism
from allennlp_deepspeed.launch.train_command import check
from allennlp_deepspeed.models.language_modeling import CausalLM
from allennlp_deepspeed.training.step_extension import StepContext
from tests.end_to_end.resize_test import assert_continues, assert_same_state, dumped, on, recover
from tests.fixtures import components  # noqa: F401  # registers "record_steps"
from tests.fixtures.tiny_lm import LLAMA
from tests.support.experiment import (
    BF16,
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.language_model import (
    assert_loss_is_of_all_tokens,
    assert_readings_are_of_all_tokens,
    token_metrics,
)
from tests.support.language_model import language_model as tiny_language_model
from tests.support.side_by_side import Batches, Side, error_of_training
from tests.support.workers import run_workers

CPU = torch.device("cpu")

FOUR_WORKERS: Config = {"distributed": {"cuda_devices": [-1] * 4}}
RESIZABLE: Config = {
    "trainer.callbacks": ["dump_state", "record_loss_curve"],
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": None},
}
SHARED: Config = {"trainer.sequence_parallel_size": 2}


def language_model(tokenizer: str, *overrides: Config) -> Config:
    # With a higher one, rounding grows tenfold every few steps.
    return tiny_language_model(tokenizer, {"trainer.optimizer.lr": 0.3}, *overrides)


def assert_same(actual: Result, expected: Result) -> None:
    assert_same_weights(actual.weights(), expected.weights(), tolerance=1e-5)
    assert token_metrics(actual) == pytest.approx(token_metrics(expected), rel=1e-5)
    assert_loss_is_of_all_tokens(actual, "validation")
    assert_readings_are_of_all_tokens(actual)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_workers_with_a_part_each(experiments: Experiments, tokenizer: str, stage: int) -> None:
    # Each step of both has the same 6 examples, of different lengths.
    one = language_model(tokenizer, {**ONE_PROCESS, "data_loader.batch_size": 6})
    accumulating = {"data_loader.batch_size": 3, "trainer.num_gradient_accumulation_steps": 2}
    two = language_model(tokenizer, TWO_WORKERS, SHARED, accumulating)
    assert_same(experiments.run(deepspeed(two, stage)), experiments.run(one))


PACKED: Config = {
    "dataset_reader.pack": True,
    "dataset_reader.max_length": 17,
    "dataset_reader.max_instances": 12,
}
TILED: Config = {"trainer.sequence_tiling": {"modules": ["mlp$"], "num_tiles": 3}}
LORA: Config = {
    "model.lora": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": "all-linear",
        "init_lora_weights": False,
    }
}


@pytest.mark.parametrize(
    "changes, stage",
    [
        pytest.param(PACKED, 2, id="packed-2"),
        pytest.param({**PACKED, **LORA}, 3, id="packed with adapters-3", marks=pytest.mark.soak),
    ],
)
def test_packed_sequences_and_adapters(
    experiments: Experiments, tokenizer: str, changes: Config, stage: int
) -> None:
    one = language_model(tokenizer, changes, {**ONE_PROCESS, "data_loader.batch_size": 3})
    less_memory = {"trainer.activation_checkpointing": ["layers.\\d+$"], **TILED}
    batch_size = {"data_loader.batch_size": 3}
    two = language_model(tokenizer, changes, TWO_WORKERS, SHARED, batch_size, less_memory)
    assert_same(experiments.run(deepspeed(two, stage)), experiments.run(one))


@pytest.mark.parametrize("stage, checkpointed", [(0, False), (1, True), (3, True)])
def test_tiles(experiments: Experiments, tokenizer: str, stage: int, checkpointed: bool) -> None:
    """Also where some ranks have fewer positions than tiles."""
    one = language_model(tokenizer, {**ONE_PROCESS, "data_loader.batch_size": 6})
    two = language_model(tokenizer, TWO_WORKERS, TILED, {"data_loader.batch_size": 3})
    if checkpointed:
        two["trainer"]["activation_checkpointing"] = ["layers.\\d+$"]
    assert_same(experiments.run(deepspeed(two, stage)), experiments.run(one))


@pytest.mark.soak
def test_with_offload_and_a_short_group(experiments: Experiments, tokenizer: str) -> None:
    short = {"dataset_reader.max_instances": 21}  # the last step has one micro-batch of two
    one = language_model(tokenizer, short, {**ONE_PROCESS, "data_loader.batch_size": 6})
    accumulating = {"data_loader.batch_size": 3, "trainer.num_gradient_accumulation_steps": 2}
    two = language_model(tokenizer, short, TWO_WORKERS, SHARED, accumulating)
    two = deepspeed(two, 3)
    two["trainer"]["deepspeed_config"]["type"] = "zero_3_offload"
    assert_same(experiments.run(two), experiments.run(one))


def test_in_half_precision(experiments: Experiments, tokenizer: str) -> None:
    # Both round, at other places, which further epochs would make larger.
    short = {"trainer.num_epochs": 1, "data_loader.batch_size": 3}
    one = language_model(tokenizer, short, ONE_PROCESS)
    two = language_model(tokenizer, short, TWO_WORKERS, SHARED)
    expected = experiments.run(deepspeed(one, 3, **BF16))
    actual = experiments.run(deepspeed(two, 3, **BF16))
    assert_same_weights(actual.weights(), expected.weights(), tolerance=0.02)
    assert token_metrics(actual) == pytest.approx(token_metrics(expected), rel=0.01, abs=0.02)


@pytest.mark.parametrize("stage", [1])
def test_two_groups_of_two_workers(experiments: Experiments, tokenizer: str, stage: int) -> None:
    one = language_model(tokenizer, {**ONE_PROCESS, "data_loader.batch_size": 6})
    # The total counts a group once.
    four = language_model(tokenizer, FOUR_WORKERS, SHARED, {"data_loader.batch_size": 3})
    four.update(
        type="deepspeed", evaluate_on_test=True, test_data_path=four["validation_data_path"]
    )
    actual = experiments.run(deepspeed(four, stage, train_batch_size=6))
    assert_same(actual, experiments.run(one))
    assert_loss_is_of_all_tokens(actual, "test")


@pytest.mark.soak
def test_recovery_with_other_groups(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    def on_workers(num_workers: int, size: int) -> Config:
        batch_size = {"data_loader.batch_size": 12 // (num_workers // size)}
        shared = {"trainer.sequence_parallel_size": size}
        return deepspeed(
            language_model(tokenizer, RESIZABLE, on(num_workers), batch_size, shared), 3
        )

    uninterrupted = experiments.run(on_workers(2, 2))
    recovered = recover(uninterrupted, tmp_path, on_workers(4, 2))
    assert_same_state(dumped(recovered, "start"), dumped(uninterrupted, "e1_b2"))
    assert_continues(recovered, uninterrupted)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_recovery_with_other_groups_where_workers_repeat_heads(tmp_path: Path, stage: int) -> None:
    """Four workers repeat two heads for keys and values, and then one worker has them all."""
    config = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}

    def batches(rank: int) -> List[Any]:
        generator = torch.Generator().manual_seed(5)
        tokens = [torch.randint(5, 50, (2, 9), generator=generator) for _ in range(3)]
        return [{"input_ids": each, "labels": each} for each in tokens]

    def train(directory: Path, world_size: int, num_epochs: int) -> Dict[str, torch.Tensor]:
        side = Side(
            lambda: CausalLM(Vocabulary(), config=config),
            batches,
            stage,
            world_size,
            num_epochs=num_epochs,
            sequence_parallel_size=world_size,
            checkpointer=Lazy(DeepSpeedCheckpointer),
        )
        return side.train(directory)

    expected = train(tmp_path / "uninterrupted", 4, 2)
    train(tmp_path / "recovered", 4, 1)
    assert_same_weights(train(tmp_path / "recovered", 1, 2), expected, tolerance=1e-5)


def test_workers_that_share_sequences_must_have_the_same_batches(tokenizer: str) -> None:
    def work(rank: int) -> str:
        sequences = SequenceParallelism(2, context_of(constructed_model()))
        same = {"input_ids": torch.arange(6).view(2, 3)}
        sequences.receive_micro_batches([same, {"input_ids": torch.tensor([[1, 2]])}])
        sequences.check(CPU)
        # The same tokens, in another order.
        moved = torch.tensor([[1, 2]]).roll(rank // 3, 1)
        sequences.receive_micro_batches([same, {"input_ids": moved}])
        with pytest.raises(RuntimeError) as error:
            sequences.check(CPU)
        return str(error.value)

    assert all(
        message.startswith("Ranks 2 to 3 share sequences, but read different batches")
        for message in run_workers(4, work)
    )


def test_batches_of_a_validation_are_compared_too() -> None:
    def batch(last: int) -> Any:
        tokens = torch.tensor([[1, 2, 3, last]])
        return {"input_ids": tokens, "labels": tokens}

    class OfRank(Batches):
        def __iter__(self) -> Iterator[Any]:
            return iter([batch(4 + dist.get_rank())])

    side = Side(
        constructed_model,
        lambda rank: [batch(4)],
        stage=2,
        world_size=2,
        validation_data_loader=OfRank([batch(4)]),
        sequence_parallel_size=2,
    )
    assert all("read different batches" in error for error in side.on_all_ranks(error_of_training))


def constructed_model() -> Model:
    return CausalLM(Vocabulary(), config=LLAMA)


def context_of(model: Model, *data_loaders: Any) -> StepContext:
    """What sequence parallelism looks at of a trainer."""
    trainer = mock.MagicMock()
    return StepContext(
        model,
        trainer.wrapped_model,
        trainer.gradients,
        callbacks=[],
        data_loaders=data_loaders,
        forward=trainer.forward,
        forward_prepared=trainer.batch_outputs,
        prepare=trainer.prepare,
    )


def test_what_cant_be_shared_is_refused(tokenizer: str) -> None:
    """In the parent, before there are workers."""

    def message(config: Config) -> str:
        with pytest.raises(ConfigurationError) as error:
            check(Params(deepspeed(config, 2)))
        return str(error.value)

    two = language_model(tokenizer, TWO_WORKERS)
    assert "must divide the world size, 2" in message(
        {**two, "trainer": {**two["trainer"], "sequence_parallel_size": 3}}
    )
    tagger = load_config("tagger", TWO_WORKERS, SHARED)
    assert 'only "causal_lm" supports sequence parallelism' in message(tagger)


def test_readers_in_python_have_to_read_by_groups() -> None:
    def work(rank: int) -> Tuple[Any, str]:
        with reading_by_groups(2):
            by_groups = BabiReader().get_distributed_info()
        loader = SimpleNamespace(reader=BabiReader())
        with pytest.raises(ConfigurationError) as error:
            SequenceParallelism(2, context_of(constructed_model(), loader))
        return (by_groups.global_rank, by_groups.world_size), str(error.value)

    results = run_workers(4, work)
    assert [info for info, _ in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all("reading_by_groups(2)" in message for _, message in results)


def test_the_reader_of_a_validation_has_to_read_by_groups() -> None:
    class Read(Batches):
        # It asks for the number of workers when it is constructed.
        reader = property(lambda self: BabiReader())

    side = Side(
        constructed_model,
        lambda rank: [],
        stage=2,
        world_size=2,
        validation_data_loader=Read([]),
        sequence_parallel_size=2,
    )
    assert "reading_by_groups(2)" in side.refusal()
