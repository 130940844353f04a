"""
Gradient caching gives the weights of the whole batch in one piece, at every ZeRO stage.
"""

import re
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

from tests.end_to_end.checkpoint_test import recover
from tests.end_to_end.gradient_synchronization_test import (
    bytes_besides,
    counted,
    gradient_bytes,
    reduced,
    traffic,
)
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
    refusal,
    train,
)

GLOBAL_BATCH_SIZE = 16  # of 55 pairs, so that 7 are left for the last step of an epoch

# With two workers these are 4 and 3, and with four 2, 2, 2 and 1.
WORKERS: Dict[int, Config] = {2: TWO_WORKERS, 4: {"distributed": {"cuda_devices": [-1] * 4}}}

EVERYTHING: Config = {
    "dataset_reader.num_negatives": 3,
    "model.learn_temperature": True,
    "model.bidirectional": True,
    "model.matryoshka_dims": [3, 10, 6],
    "model.matryoshka_weights": [2, 1, 0.5],
    "model.document_seq2vec_encoder": {
        "type": "bag_of_embeddings",
        "embedding_dim": 12,
        "averaged": True,
    },
    "trainer.num_gradient_accumulation_steps": 3,
    "trainer.grad_norm": 0.5,
}


CHUNK_SIZES = {"query": 3, "document": 5, "negatives": 2}


def in_one_piece(*changes: Config) -> Config:
    """With `gradient_descent`, in one process."""
    return load_config(
        "bi_encoder", ONE_PROCESS, {"data_loader.batch_size": GLOBAL_BATCH_SIZE}, *changes
    )


def divided(num_workers: int, *changes: Config) -> Config:
    """The same global batches."""
    batch_size = {"data_loader.batch_size": GLOBAL_BATCH_SIZE // num_workers}
    return load_config("bi_encoder", WORKERS[num_workers], batch_size, *changes)


def cached(config: Config, stage: int, chunk_size: Any = 3, **sections: Any) -> Config:
    config = deepspeed(config, stage, **sections)
    config["trainer"]["grad_cache"] = {"chunk_size": chunk_size}
    return config


def assert_same(actual: Result, expected: Result) -> None:
    """The same weights and metrics, but for the validation loss, which is one of batches."""
    assert_same_weights(actual.weights(), expected.weights())
    metrics, expected_metrics = (
        {
            key: value
            for key, value in result.metrics_of_epochs().items()
            if not re.search("validation_loss|best_epoch", key)
        }
        for result in (actual, expected)
    )
    assert len(expected_metrics) > 20
    assert_same_metrics(metrics, expected_metrics)


@pytest.mark.parametrize(
    "num_workers, stage",
    [(2, 0), (2, 1), (2, 2), (2, 3), pytest.param(4, 3, marks=pytest.mark.soak)],
)
def test_the_weights_are_those_of_one_piece(experiments: Experiments, num_workers: int, stage: int):
    config = cached(divided(num_workers, EVERYTHING), stage, CHUNK_SIZES)
    assert_same(experiments.run(config), experiments.run(in_one_piece(EVERYTHING)))


@pytest.mark.parametrize("stage, mode", [(0, "step"), (2, "micro_batch"), (3, "step")])
def test_gradients_are_reduced_as_often_as_the_mode_says(
    experiments: Experiments, stage: int, mode: str
):
    accumulation = {"trainer.num_gradient_accumulation_steps": 2}
    config = counted(divided(2, accumulation), stage, mode)
    config["trainer"]["grad_cache"] = {"chunk_size": 3}
    result = experiments.run(config)
    # The second step of an epoch has one micro-batch of 8, and one of 4 on one rank and 3 on the
    # other: 3 chunks and 2.
    times = 3 + 2 if mode == "micro_batch" else 1
    _, num_bytes = reduced(traffic(result)[0])
    # Each worker computes a part of the loss: their sum, and of two vectors of 10 numbers a pair
    # their gradients, of as many pairs from each worker.
    of_loss = sum(4 + 2 * pairs * 2 * 10 * 4 for pairs in (8, 4))
    # The temperature isn't trained.
    gradient = gradient_bytes(result, stage) - 4 * (2 if stage == 3 else 1)
    besides = bytes_besides(result, stage) - (4 if stage == 0 else 0)
    assert num_bytes == times * gradient + besides + of_loss
    assert_same(result, experiments.run(in_one_piece(accumulation)))


def gathered(experiments: Experiments, stage: int, chunk_size: int, *callbacks: str) -> int:
    """Bytes in the last step of the second epoch, of 4 pairs on a worker and 3 on the other."""
    config = counted(divided(2), stage)
    config["trainer"].update(
        grad_cache={"chunk_size": chunk_size}, reshard_after_micro_batch="auto"
    )
    config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], *callbacks]
    result = experiments.run(config)
    assert_same(result, experiments.run(in_one_piece()))
    step = traffic(result)[5]
    # DeepSpeed broadcasts when it finds another order of modules than it has recorded.
    assert "broadcast" not in step or step["broadcast"] == [0, 0]
    return step["all_gather"][1]


def test_parameters_are_gathered_once_a_micro_batch_at_stage_3(experiments: Experiments):
    of_representations = gathered(experiments, 0, 3)
    whole = gradient_bytes(experiments.run(deepspeed(divided(2), 3)), 3)
    assert gathered(experiments, 3, 3) - of_representations == whole
    little = gathered(experiments, 3, 3, "little_memory_on_rank_1") - of_representations
    assert little > 3 * whole


def test_the_same_model_trains_without_caching(experiments: Experiments):
    config = divided(2, EVERYTHING)
    expected = experiments.run(in_one_piece(EVERYTHING))
    assert_same(experiments.run(deepspeed(config, 3)), expected)
    # Which drops what one worker has more for validation.
    by_allennlp = experiments.run(config)
    assert_same_weights(by_allennlp.weights(), expected.weights())


def test_a_loss_that_is_not_divided(experiments: Experiments):
    whole = {"model.type": "bi_encoder_of_the_whole_loss", "model.learn_temperature": True}
    result = experiments.run(cached(divided(2, whole), 3))
    assert_same(result, experiments.run(in_one_piece(whole)))


def test_any_model_with_the_interface(experiments: Experiments):
    model = {"type": "plain_bi_encoder"}
    for key in ("text_field_embedder", "seq2vec_encoder"):
        model[key] = in_one_piece()["model"][key]
    config = cached(divided(2, {"model": model}), 3, {"query": 3, "document": 4})
    result, expected = experiments.run(config), experiments.run(in_one_piece({"model": model}))
    assert_same_weights(result.weights(), expected.weights())
    key = "training_loss"
    assert result.final_metrics()[key] == pytest.approx(expected.final_metrics()[key], rel=1e-5)


def test_dropout_is_the_same_in_both_passes(experiments: Experiments):
    """The other run encodes the same chunks with a graph, which it holds until it goes backward."""
    dropout = {"model.dropout": 0.3}
    in_chunks = {"model.type": "bi_encoder_in_chunks", "model.chunk_size": 3}
    config = cached(divided(2, dropout), 3)
    result = experiments.run(config)
    expected = experiments.run(deepspeed(divided(2, dropout, in_chunks), 0))
    assert_same(result, expected)
    without = experiments.run(in_one_piece()).weights()
    with pytest.raises(AssertionError):
        assert_same_weights(result.weights(), without, tolerance=0.01)


def test_local_negatives(experiments: Experiments):
    local = {"model.negatives": "local", "dataset_reader.num_negatives": 2}
    expected = experiments.run(divided(2, local))  # AllenNLP averages the workers' gradients
    result = experiments.run(cached(divided(2, local), 3))
    assert_same_weights(result.weights(), expected.weights())
    of_all = experiments.run(in_one_piece({"dataset_reader.num_negatives": 2})).weights()
    with pytest.raises(AssertionError):
        assert_same_weights(result.weights(), of_all, tolerance=0.01)


def test_offload_where_a_chunk_uses_only_one_encoder(experiments: Experiments):
    config = cached(divided(2, EVERYTHING), 2, CHUNK_SIZES)
    zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
    zero["offload_optimizer"] = {"device": "cpu"}
    config["trainer"]["gradient_synchronization"] = "micro_batch"
    assert_same(experiments.run(config), experiments.run(in_one_piece(EVERYTHING)))


def test_a_frozen_encoder(experiments: Experiments):
    frozen = {**EVERYTHING, "trainer.no_grad": ["^_document_encoder.*"]}
    config = cached(divided(2, frozen), 3, CHUNK_SIZES)
    assert_same(experiments.run(config), experiments.run(in_one_piece(frozen)))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_short_group_of_which_one_worker_has_more(
    experiments: Experiments, chunk_size: Optional[int]
):
    """All divide the loss by the micro-batches that all have, since it is one of all workers."""
    uneven: Config = {
        "datasets_for_vocab_creation": ["validation"],
        "trainer.num_gradient_accumulation_steps": 2,
    }
    # Of 55 pairs one worker has 28, in batches of 9, 9, 9 and 1, the other 27.
    config = divided(2, uneven, {"data_loader.batch_size": 9})
    config = deepspeed(config, 2) if chunk_size is None else cached(config, 2, chunk_size)
    even = {"data_loader.batch_size": 18, "dataset_reader.max_instances": 54}
    assert_same_weights(
        experiments.run(config).weights(), experiments.run(in_one_piece(uneven, even)).weights()
    )


class TestAuto:
    """`"chunk_size": "auto"`"""

    def test_is_what_fits_on_every_rank(self, experiments: Experiments):
        config = cached(divided(2), 3, "auto")
        callback = {"type": "little_memory_on_rank_1", "num_bytes": 34_000}
        config["trainer"]["callbacks"].append(callback)
        result = experiments.run(config)
        assert found(result) == ["3"]
        assert_same(result, experiments.run(in_one_piece()))

    def test_what_was_found_and_random_states_hold_after_recovery(
        self, experiments: Experiments, tmp_path: Path
    ):
        checkpoints = {
            "model.dropout": 0.3,
            "trainer.checkpointer": {
                "save_every_num_batches": 2,
                "keep_most_recent_by_count": None,
            },
        }
        config = cached(divided(2, checkpoints), 2, "auto")
        result = experiments.run(config)
        config["trainer"]["callbacks"].append("little_memory_on_rank_1")
        recovered = recover(result, tmp_path, config, "checkpoint_e0_b2")
        assert_same_metrics(recovered.metrics_of_epochs(), result.metrics_of_epochs(), tolerance=0)
        assert_same_weights(recovered.weights(), result.weights(), tolerance=0)
        # In the log of before.
        assert found(recovered) == found(result) == ["8"]


def found(result: Result) -> List[str]:
    """The chunk sizes that are in the log."""
    log = (result.serialization_dir / "out_worker0.log").read_text()
    return re.findall(r"'grad_cache.chunk_size' is (\d+) from now on", log)


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param(
            {"trainer.grad_cache": {"chunk_size": {"query": 4, "documents": 4}}},
            "'trainer.grad_cache.chunk_size.documents' isn't an argument of `encode` of BiEncoder, "
            "which has query, document, negatives",
            id="unknown encoder",
        ),
        pytest.param(
            {"trainer.grad_cache": {"chunk_size": {"query": 4}}},
            "'trainer.grad_cache.chunk_size' has no 'document', which the data has",
            id="encoder without a chunk size",
        ),
        pytest.param(
            {
                "model.type": "bi_encoder_of_both",
                "trainer.grad_cache": {"chunk_size": {"document": 4, "query": 4}},
            },
            "`encode` of BiEncoderOfBoth can't be called without 'query'",
            id="arguments without defaults",
        ),
        pytest.param(
            {"model.type": "normalizing_bi_encoder"},
            "can't be used with BatchNorm1d ('norm'), which would compute statistics over a chunk",
            id="batch normalization",
        ),
        pytest.param(
            {"model.type": "bi_encoder_without_mean"},
            "The loss of BiEncoderWithoutMean has shape (8,), but 'trainer.grad_cache' needs a "
            "scalar",
            id="loss that is no scalar",
        ),
        pytest.param(
            {"trainer.callbacks": ["change_gradients"]},
            "The callback ChangeGradients has 'on_backward'",
            id="callback that goes backward",
        ),
        pytest.param(
            {"model.matryoshka_dims": [10, 12]},
            "'model.matryoshka_dims' is [10, 12]: write different numbers from 1 to 10, the "
            "dimension of the representations",
            id="too many dimensions",
        ),
        pytest.param(
            {"model.matryoshka_dims": [10, 5], "model.matryoshka_weights": [1, 0]},
            "'model.matryoshka_weights' is [1, 0]: write a number above 0 for each number of "
            "'model.matryoshka_dims'",
            id="dimensions without weight",
        ),
        pytest.param(
            {"model.negatives": "all"},
            "'model.negatives' is 'all': write \"global\"",
            id="unknown negatives",
        ),
    ],
)
def test_is_refused(tmp_path: Path, changes: Config, message: str):
    config = cached(load_config("bi_encoder", ONE_PROCESS), 2)
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    assert message in refusal(config, tmp_path)


def test_a_model_without_the_interface_is_refused(tmp_path: Path):
    message = refusal(cached(load_config("classifier", ONE_PROCESS), 2), tmp_path)
    assert "'trainer.grad_cache' needs a model with `encode`" in message


def test_a_worker_without_validation_data_is_an_error_on_all(tmp_path: Path):
    config = cached(divided(4), 2)
    one = tmp_path / "one.jsonl"
    one.write_text('{"query": "name1", "document": "name2"}\n')
    config["validation_data_path"] = str(one)
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert "no validation data" in run.output
