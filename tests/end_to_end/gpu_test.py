"""
Parity with "gradient_descent" and the precisions of the other tests, on GPUs.

The commands run as a user starts them, without the fork server: a process that has been forked from
one that has seen a GPU can't use it.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from allennlp.common.testing import requires_gpu

from allennlp_deepspeed.models.attention import BlockSparseAttention
from tests.end_to_end import resize_test
from tests.end_to_end.checkpoint_test import CHECKPOINTS, recover
from tests.end_to_end.grad_cache_test import CHUNK_SIZES, EVERYTHING, cached
from tests.end_to_end.offload_test import TRAINING as STEPS
from tests.end_to_end.offload_test import stepped_by, with_preset
from tests.end_to_end.parity_test import TRAINING, check_parity
from tests.end_to_end.resize_test import assert_continues, resizable
from tests.support.command import REPOSITORY, Run, allennlp, subprocess_allennlp
from tests.support.experiment import (
    BF16,
    FP16,
    Config,
    Experiments,
    assert_fp32_master_weights,
    assert_same_metrics,
    assert_same_weights,
    assert_trains_alike,
    deepspeed,
    load_config,
)
from tests.unit.attention.block_sparse_attention_test import LAYOUTS

# Enough epochs to learn, of which the last is always the best.
EPOCHS: Config = {"trainer.num_epochs": 8, "trainer.validation_metric": "-loss"}
# Adam doesn't tell a gradient from another that is so many times as large.
SGD: Config = {
    "trainer.optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.8},
    "trainer.grad_norm": 1.0,
}
AUTOCAST: Config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

TWO_GPUS: Config = {"distributed": {"cuda_devices": [0, 1]}}
ONE_GPU: Config = {"trainer.cuda_device": 0}

# Set by `gpu_blocks_test.py`, which tries on the CPU whether tests of two GPUs are right.
ON_CPU = "GPU_TESTS_ON_CPU" in os.environ
# The last one and the one before it, so that ranks aren't the numbers of their devices.
OTHERS = [-1, -1] if ON_CPU else [torch.cuda.device_count() - i for i in (1, 2)]
OTHER_TWO: Config = {"distributed": {"cuda_devices": OTHERS}}
OTHER_ONE: Config = {"trainer.cuda_device": OTHERS[0]}

ON_ONE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_TWO = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two")]
WORLDS = pytest.mark.parametrize(
    "world",
    [pytest.param(ONE_GPU, marks=ON_ONE, id="one"), pytest.param(TWO_GPUS, marks=ON_TWO, id="two")],
)
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2 and not ON_CPU, reason="needs two")

# Each precision, at each stage. From the usual 2 ** 16, the loss scale of fp16 comes down to one
# that fits by leaving out steps.
PRECISIONS = pytest.mark.parametrize(
    "precision, stage",
    [(AUTOCAST, 0), (FP16, 2), (BF16, 3)],
    ids=["torch_autocast", "fp16", "bf16"],
)

# With few instances in a step, SGD at this rate makes something else of each rounding, in fp32 too.
LARGE_BATCHES: Config = {"data_loader.batch_size": 16}

# The gradients of embeddings are added up in no fixed order on a GPU, so that not even two runs of
# one trainer are the same to the last bit.
TOLERANCE = 1e-4


def run_on_gpu(*arguments: Any, time_limit: float) -> Run:
    if ON_CPU:
        return allennlp(*arguments, time_limit=time_limit)
    environment = {
        **os.environ,
        # Matrix products in whole fp32, on every kind of GPU.
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    return subprocess_allennlp(
        *arguments,
        "--include-package",
        "allennlp_deepspeed",
        # The workers import everything before they begin.
        time_limit=time_limit + 120,
        cwd=REPOSITORY,
        env=environment,
    )


@pytest.fixture(scope="session")
def gpu_experiments(session_directory: Path) -> Experiments:
    return Experiments(session_directory / "gpu_experiments", run_on_gpu)


@WORLDS
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("model", TRAINING)
def test_training_is_that_of_gradient_descent(
    gpu_experiments: Experiments, model: str, stage: int, world: Config
) -> None:
    check_parity(gpu_experiments, load_config(model, world, TRAINING[model]), stage, TOLERANCE)


# DeepSpeed's default of what stage 3 leaves unsharded, and a layer that is larger.
PERSISTENT = {"stage3_param_persistence_threshold": 100_000, "stage3_prefetch_bucket_size": 1000}
LARGE_LAYER: Config = {
    "model.feedforward": {
        "input_dim": 24,
        "num_layers": 3,
        "hidden_dims": [400, 400, 8],
        "activations": "relu",
    }
}


@pytest.mark.gpu
@NEEDS_TWO
@pytest.mark.parametrize(
    "model, world, changes, stage, zero",
    [
        ("transformer", OTHER_ONE, {}, 2, {}),
        ("tagger", OTHER_TWO, {}, 1, {"overlap_comm": True, "reduce_bucket_size": 500}),
        ("transformer", OTHER_TWO, {}, 2, {"overlap_comm": True, "reduce_bucket_size": 500}),
        ("classifier", OTHER_TWO, LARGE_LAYER, 3, {"overlap_comm": True, **PERSISTENT}),
    ],
    ids=["one", "stage 1", "stage 2", "stage 3"],
)
def test_training_on_other_gpus_is_that_of_gradient_descent(
    gpu_experiments: Experiments,
    model: str,
    world: Config,
    changes: Config,
    stage: int,
    zero: Config,
) -> None:
    config = load_config(model, world, TRAINING[model], changes)
    check_parity(gpu_experiments, config, stage, TOLERANCE, **zero)


@pytest.mark.gpu
@NEEDS_TWO
@pytest.mark.parametrize(
    "before, after, stage, zero",
    [
        (OTHER_TWO, OTHER_ONE, 1, {"overlap_comm": True}),
        (OTHER_ONE, OTHER_TWO, 2, {"overlap_comm": True}),
        (OTHER_TWO, OTHER_ONE, 3, PERSISTENT),
    ],
    ids=["2 to 1, stage 1", "1 to 2, stage 2", "2 to 1, stage 3"],
)
def test_another_number_of_gpus_continues_the_same_training(
    gpu_experiments: Experiments,
    tmp_path: Path,
    before: Config,
    after: Config,
    stage: int,
    zero: Config,
) -> None:
    first, second = (
        deepspeed(resizable(1 if world is OTHER_ONE else 2, world), stage, zero_optimization=zero)
        for world in (before, after)
    )
    uninterrupted = gpu_experiments.run(first)
    recovered = resize_test.recover(uninterrupted, tmp_path, second, command=run_on_gpu)
    assert_continues(recovered, uninterrupted, TOLERANCE)


@requires_gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_model_trains_as_with_gradient_descent(
    gpu_experiments: Experiments, stage: int
) -> None:
    config = load_config("transformer", ONE_GPU, TRAINING["transformer"])
    compiled = deepspeed(config, stage)
    compiled["trainer"]["torch_compile"] = True
    if stage == 3:
        leaves = {"classes": ["PytorchTransformer"]}
        compiled["trainer"]["deepspeed_config"]["zero_optimization"]["leaf_module"] = leaves
    actual, expected = gpu_experiments.run(compiled), gpu_experiments.run(config)
    assert_same_metrics(actual.metrics(), expected.metrics(), TOLERANCE)
    assert_same_weights(actual.weights(), expected.weights(), TOLERANCE)


@WORLDS
@PRECISIONS
@pytest.mark.parametrize("optimizer", [{}, SGD], ids=["adam", "sgd"])
def test_precisions_train_as_fp32_does(
    gpu_experiments: Experiments, optimizer: Config, precision: Config, stage: int, world: Config
) -> None:
    size = LARGE_BATCHES if world is ONE_GPU else {}
    config = load_config("classifier", {**world, **size, **optimizer}, EPOCHS)
    actual = gpu_experiments.run(deepspeed(config, stage, **precision))
    assert_trains_alike(actual, gpu_experiments.run(config))
    assert_fp32_master_weights(actual)


@requires_gpu
def test_adagrad_has_its_state_on_the_gpu(gpu_experiments: Experiments) -> None:
    config = load_config("classifier", ONE_GPU, {"trainer.optimizer.type": "adagrad"})
    result = gpu_experiments.run(deepspeed(config, 0))
    assert_same_weights(result.weights(), gpu_experiments.run(config).weights(), TOLERANCE)


@requires_gpu
@pytest.mark.parametrize(
    "name, preset",
    [
        ("adam", "zero_3_offload"),
        ("adamw", "zero_2_offload"),
        ("adagrad", "zero_3_offload"),
        ("lion", "zero_2_offload"),
    ],
)
def test_offloaded_training_on_one_gpu_is_that_of_gradient_descent(
    gpu_experiments: Experiments, name: str, preset: str
) -> None:
    config = load_config("tagger", ONE_GPU, STEPS, stepped_by(name))
    result = gpu_experiments.run(with_preset(config, preset))
    assert_same_weights(result.weights(), gpu_experiments.run(config).weights(), TOLERANCE)


@requires_gpu
@pytest.mark.parametrize("name, stage", [("adam", 0), ("adamw", 2), ("adam", 3)])
def test_fused_optimizers_step_as_their_counterparts_do(
    gpu_experiments: Experiments, name: str, stage: int
) -> None:
    config = load_config("tagger", ONE_GPU, STEPS, stepped_by(name))
    fused = {**config["trainer"]["optimizer"], "type": f"fused_{name}"}
    fused_config = {**config, "trainer": {**config["trainer"], "optimizer": fused}}
    result = gpu_experiments.run(deepspeed(fused_config, stage))
    assert_same_weights(result.weights(), gpu_experiments.run(config).weights(), TOLERANCE)


@requires_gpu
def test_use_amp_trains_as_with_gradient_descent(gpu_experiments: Experiments) -> None:
    config = load_config("classifier", ONE_GPU, EPOCHS, LARGE_BATCHES, {"trainer.use_amp": True})
    assert_trains_alike(gpu_experiments.run(deepspeed(config, 2)), gpu_experiments.run(config))


@requires_gpu
@PRECISIONS
def test_a_recovered_run_on_one_gpu_ends_as_an_uninterrupted_one(
    gpu_experiments: Experiments, tmp_path: Path, precision: Config, stage: int
) -> None:
    # Dropout of a kind whose random state can be saved.
    dropout = {"model.encoder.dropout": 0.0, "model.encoder.num_layers": 1}
    config = checkpointed({**dropout, "model.encoder.hidden_size": 10}, precision, stage)
    uninterrupted = gpu_experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b2", command=run_on_gpu)
    assert_same_weights(recovered.weights(), uninterrupted.weights(), TOLERANCE)


@requires_gpu
def test_recovery_says_which_dropout_is_another(
    gpu_experiments: Experiments, tmp_path: Path
) -> None:
    config = checkpointed({}, {}, 2)
    uninterrupted = gpu_experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b2", command=run_on_gpu)
    log = (recovered.serialization_dir / "out.log").read_text()
    assert "the dropout between layers of encoder._module" in log
    losses = [epoch["training_loss"] for epoch in recovered.epochs()]
    expected = [epoch["training_loss"] for epoch in uninterrupted.epochs()]
    assert losses == pytest.approx(expected, abs=0.02)


def checkpointed(changes: Config, precision: Config, stage: int) -> Config:
    config = load_config("tagger", CHECKPOINTS, ONE_GPU, changes)
    del config["distributed"]
    return deepspeed(config, stage, **precision)


@WORLDS
@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_caching_is_one_piece(
    gpu_experiments: Experiments, stage: int, world: Config
) -> None:
    size = 16 if world is ONE_GPU else 8
    config = load_config("bi_encoder", world, EVERYTHING, {"data_loader.batch_size": size})
    whole = load_config("bi_encoder", ONE_GPU, EVERYTHING, {"data_loader.batch_size": 16})
    result = gpu_experiments.run(cached(config, stage, CHUNK_SIZES))
    assert_same_weights(result.weights(), gpu_experiments.run(whole).weights(), TOLERANCE)


@requires_gpu
@PRECISIONS
def test_dropout_on_one_gpu_is_the_same_in_both_passes(
    gpu_experiments: Experiments, precision: Config, stage: int
) -> None:
    size = {"data_loader.batch_size": 16, "model.dropout": 0.3}
    config = load_config("bi_encoder", ONE_GPU, size)
    in_chunks = {"model.type": "bi_encoder_in_chunks", "model.chunk_size": 3}
    with_graphs = deepspeed(load_config("bi_encoder", ONE_GPU, size, in_chunks), 0)
    losses, expected = (
        [epoch["training_loss"] for epoch in gpu_experiments.run(config).epochs()]
        for config in (cached(config, stage, **precision), with_graphs)
    )
    assert losses == pytest.approx(expected, abs=0.05)


@requires_gpu
def test_dropout_between_layers_on_one_gpu_is_the_same_in_both_passes(
    gpu_experiments: Experiments,
) -> None:
    lstm = {"type": "lstm", "input_size": 12, "hidden_size": 8, "num_layers": 2, "dropout": 0.5}
    size = {"data_loader.batch_size": 16, "model.seq2vec_encoder": lstm}
    in_chunks = {"model.type": "bi_encoder_in_chunks", "model.chunk_size": 3}
    result = gpu_experiments.run(cached(load_config("bi_encoder", ONE_GPU, size), 3))
    with_graphs = load_config("bi_encoder", ONE_GPU, size, in_chunks)
    expected = gpu_experiments.run(deepspeed(with_graphs, 0))
    assert_same_weights(result.weights(), expected.weights(), TOLERANCE)


@requires_gpu
def test_dropout_between_layers_on_one_gpu_is_the_same_when_recomputed(
    gpu_experiments: Experiments,
) -> None:
    encoder = {"model.encoder.num_layers": 2, "model.encoder.dropout": 0.5}
    config = load_config("tagger", ONE_GPU, encoder, SGD)
    # The one starts its dropout anew before the module is computed, the other in the module.
    restarting = {**config, "model": {**config["model"], "type": "tagger_restarting_dropout"}}
    recomputing = deepspeed(config, 3)
    recomputing["trainer"]["activation_checkpointing"] = ["^encoder$"]
    result = gpu_experiments.run(recomputing)
    expected = gpu_experiments.run(restarting)
    assert_same_weights(result.weights(), expected.weights(), TOLERANCE)


@requires_gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_block_sparse_attention_on_a_gpu_is_that_on_a_cpu(name: str) -> None:
    section = {"block": 16, **LAYOUTS[name], "max_length": 512}
    if LAYOUTS[name]["mode"] != "bigbird":
        del section["max_length"]
    generator = torch.Generator().manual_seed(1)
    for length in (300, 128, 41):
        mask = torch.arange(length) < torch.tensor([length, 30, 0])[:, None]
        tensors = torch.randn(3, 3, 4, length, 32, generator=generator, requires_grad=True)
        weights = torch.randn(3, 4, length, 32, generator=generator)
        results = []
        for device in ("cpu", "cuda"):
            there = tensors.detach().to(device).requires_grad_()
            sparse = BlockSparseAttention.from_section(section)
            result = sparse.attend(*there, mask.to(device), layer=1)
            (result * weights.to(device)).sum().backward()
            assert there.grad is not None
            results.append([result.cpu(), there.grad.cpu()])
        torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


@requires_gpu
def test_a_block_sparse_encoder_on_one_gpu_trains_what_dense_attention_does(
    gpu_experiments: Experiments,
) -> None:
    attention = {"type": "block_sparse", "mode": "bigbird", "block": 2, "max_length": 16}
    sizes = {"input_dim": 32, "num_attention_heads": 2}
    config = load_config("transformer", ONE_GPU, SGD)
    config["model"]["text_field_embedder"]["token_embedders"]["tokens"]["embedding_dim"] = 32
    config["model"]["seq2vec_encoder"]["embedding_dim"] = 32
    encoder = {**config["model"]["seq2seq_encoder"], **sizes, "attention": attention}
    config["model"]["seq2seq_encoder"] = {**encoder, "type": "masked_pytorch_transformer"}
    expected = gpu_experiments.run(config)
    config["model"]["seq2seq_encoder"] = {**encoder, "type": "block_sparse_transformer"}
    result = gpu_experiments.run(deepspeed(config, stage=3))
    assert_same_weights(result.weights(), expected.weights(), TOLERANCE)
