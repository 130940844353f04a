"""Gradient caching with the loss scale of fp16, and the memory that a chunk leaves."""

import re
from pathlib import Path
from typing import Any, Dict
from unittest import mock

import pytest
import torch
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.training import free_memory
from tests.support.experiment import assert_same_weights, load_config


def construct(directory: Path, deepspeed_config: Dict[str, Any], **settings: Any) -> Any:
    config = load_config("bi_encoder", {"model.learn_temperature": True})
    # Without a maximum over tokens: which of them has it, rounding may decide.
    encoder = {"type": "boe", "embedding_dim": 12, "averaged": True}
    params = Params({**config, "model": {**config["model"], "seq2vec_encoder": encoder}})
    prepare_environment(params)
    data_loader = DataLoader.from_params(
        Params({"batch_size": 16}),
        reader=DatasetReader.from_params(params.pop("dataset_reader")),
        data_path=params.pop("train_data_path"),
    )
    vocab = Vocabulary.from_instances(data_loader.iter_instances())
    data_loader.index_with(vocab)
    model = Model.from_params(params.pop("model"), vocab=vocab)
    return DeepSpeedTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader,
        num_epochs=1,
        cuda_device=-1,
        serialization_dir=directory,
        enable_default_callbacks=False,
        deepspeed_config=deepspeed_config,
        **settings,
    )


@pytest.mark.parametrize("stage, chunk_size", [(0, 3), (2, 16), (3, 3)])
def test_gradient_caching_in_fp16_is_that_of_fp32(
    tmp_path: Path, stage: int, chunk_size: int
) -> None:
    zero: Dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    fp16 = {"enabled": True, "initial_scale_power": 12}
    reference = construct(tmp_path / "fp32", {"zero_optimization": {"stage": 0}})
    before = {name: weight.clone() for name, weight in reference.model.state_dict().items()}
    reference.train()
    trainer = construct(
        tmp_path / "fp16",
        {"zero_optimization": zero, "fp16": fp16},
        grad_cache={"chunk_size": chunk_size},
    )
    trainer.train()
    moves, expected = (
        {name: weight - before[name] for name, weight in each.model.state_dict().items()}
        for each in (trainer, reference)
    )
    assert_same_weights(moves, expected, tolerance=0.05)


def test_a_chunk_leaves_room_for_what_the_optimizer_is_to_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = {"zero_optimization": {"stage": 2}}
    trainer = construct(tmp_path, config, grad_cache={"chunk_size": "auto"})
    num_elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    free = 10**6
    with mock.patch.object(free_memory, "min_free_bytes", lambda device: free):
        trainer.train()
    (left,) = re.findall(r"is still to allocate, (\d+) bytes are free", caplog.text)
    # Two gradients, and two numbers for each element, in fp32. A shard may be padded.
    assert int(left) == pytest.approx(free - 4 * 4 * num_elements, abs=64)
