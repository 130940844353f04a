"""A loss scale, of which fp16 on a GPU has one, multiplies the gradient once."""

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
from tests.experiment import assert_same_weights, load_config


def train(directory: Path, scale: float, **settings: Any) -> Dict[str, torch.Tensor]:
    """
    Trains with an engine that multiplies each loss by `scale`, and an optimizer that divides the
    gradients by it before it steps.
    """
    params = Params(load_config("bi_encoder", {"model.learn_temperature": True}))
    prepare_environment(params)
    data_loader = DataLoader.from_params(
        Params({"batch_size": 16}),
        reader=DatasetReader.from_params(params.pop("dataset_reader")),
        data_path=params.pop("train_data_path"),
    )
    vocab = Vocabulary.from_instances(data_loader.iter_instances())
    data_loader.index_with(vocab)
    model = Model.from_params(params.pop("model"), vocab=vocab)
    trainer = DeepSpeedTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader,
        num_epochs=1,
        cuda_device=-1,
        serialization_dir=directory,
        enable_default_callbacks=False,
        deepspeed_config={"zero_optimization": {"stage": 2}},
        **settings,
    )
    backward = trainer.engine.backward

    def scaled_backward(loss: torch.Tensor, **kwargs: Any) -> None:
        backward(loss * scale, **kwargs)

    def unscale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(scale)

    trainer.optimizer.register_step_pre_hook(unscale)
    with mock.patch.object(trainer.engine, "backward", scaled_backward):
        trainer.train()
    return model.state_dict()


@pytest.mark.parametrize("chunk_size", [3, 16])
def test_a_loss_scale_multiplies_the_gradient_once(tmp_path: Path, chunk_size: int):
    expected = train(tmp_path / "plain", scale=1)
    weights = train(tmp_path / "scaled", scale=1024, grad_cache={"chunk_size": chunk_size})
    assert_same_weights(weights, expected)
