"""In bf16, modules that are made for half precision compute as with DeepSpeed alone."""

import copy
import re
from typing import Any, Callable, Dict, List

import deepspeed
import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig

from allennlp_deepspeed import TrainingTraits
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.support.side_by_side import CPU, Batch, Side, error_of_training
from tests.support.workers import run_workers

BF16 = {"bf16": {"enabled": True}}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 20}
NUM_LAYERS = 2


def batches(rank: int) -> List[Batch]:
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(1, 20, (3, 7), generator=generator) for _ in range(4)]
    return [{"input_ids": each, "labels": each} for each in ids]


def rounded(model: Model) -> Model:
    """With weights that bf16 has, because fp32 master weights start from them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


class Recording(Model):
    """Base class of models that record their losses, and where they run under autocast."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        torch.manual_seed(1)
        self.embedding = nn.Embedding(20, 16)
        self.losses: List[float] = []
        self.is_autocast: Dict[str, bool] = {}
        self.inner = self.construct_inner()
        self.head = nn.Linear(16, 20)
        self.head.register_forward_pre_hook(self._record("head"))
        first = next(m for m in self.inner.modules() if isinstance(m, nn.LayerNorm))
        first.register_forward_pre_hook(self._record("inner"))

    def construct_inner(self) -> nn.Module:
        raise NotImplementedError

    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _record(self, name: str) -> Callable:
        # Called with the module of a copy, too, whose records nobody reads.
        return lambda *_: self.is_autocast.update({name: torch.is_autocast_enabled("cpu")})

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> Dict[str, torch.Tensor]:
        logits = self.head(self.states(input_ids)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.losses.append(float(loss.detach()))
        return {"loss": loss}


class OfPyTorch(Recording):
    training_traits = TrainingTraits(computes_in_weights_dtype=True)

    def construct_inner(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)

    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embedding(input_ids))


class OfTransformers(Recording):
    training_traits = TrainingTraits(computes_in_weights_dtype=True)

    def construct_inner(self) -> nn.Module:
        config = BertConfig(**SIZES, num_hidden_layers=NUM_LAYERS, hidden_dropout_prob=0.0)
        config.attention_probs_dropout_prob = 0.0
        return BertModel(config, add_pooling_layer=False)

    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids).last_hidden_state


class WithPositions(OfPyTorch):
    """As AllenNLP's `pytorch_transformer`: adds an fp32 tensor to what the transformer is given."""

    training_traits = TrainingTraits(computes_in_weights_dtype=False)

    def states(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.size(1), dtype=torch.float32)
        return self.inner(self.embedding(input_ids) + positions[:, None] / 7)


class Decoder(CausalLM):
    def __init__(self) -> None:
        torch.manual_seed(1)
        config = LlamaConfig(**SIZES, num_hidden_layers=NUM_LAYERS).to_diff_dict()
        super().__init__(Vocabulary(), config={**config, "model_type": "llama"})
        self.losses: List[float] = []

    def forward(self, **inputs: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        outputs = super().forward(**inputs)
        self.losses.append(float(outputs["loss"].detach()))
        return outputs


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def losses_of_training(trainer: Any) -> List[float]:
    trainer.train()
    return trainer.model.losses


def losses_of_deepspeed_alone(side: Side) -> List[float]:
    def train(rank: int) -> List[float]:
        with process_environment(CPU, rank):
            torch.manual_seed(7)
            model = side.model()
            config = {
                **side.deepspeed_config,
                "train_micro_batch_size_per_gpu": 3,
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=side.optimizer(model.parameters()), config=config
            )
            for batch in side.batches(rank) * 2:
                engine.backward(engine(**batch)["loss"])
                engine.step()
            return model.losses

    return run_workers(1, train)[0]


@pytest.mark.parametrize(
    "model, stage", [(OfPyTorch, 1), (OfTransformers, 2), (OfTransformers, 3), (Decoder, 3)]
)
def test_losses_are_those_of_deepspeed_alone(model: Callable[[], Model], stage: int) -> None:
    side = Side(
        lambda: rounded(model()), batches, stage, optimizer=sgd, deepspeed_config=BF16, num_epochs=2
    )
    (actual,) = side.on_all_ranks(losses_of_training)
    assert actual == losses_of_deepspeed_alone(side)
    assert actual[-1] < actual[0]


@pytest.mark.parametrize(
    "model, autocast, expected, precision, stage",
    [
        (WithPositions, "auto", {"inner": False, "head": True}, "bf16", 3),
        (OfTransformers, "auto", {"inner": False, "head": False}, "fp16", 0),
        (OfTransformers, True, {"inner": True, "head": True}, "bf16", 3),
        (OfTransformers, False, {"inner": False, "head": False}, "fp16", 0),
    ],
)
def test_modules_that_run_under_autocast(
    model: Any, autocast: Any, expected: Dict[str, bool], precision: str, stage: int
) -> None:
    def train(trainer: Any) -> Dict[str, bool]:
        trainer.train()
        return trainer.model.is_autocast

    config = {precision: {"enabled": True}}
    side = Side(
        model,
        batches,
        stage,
        deepspeed_config=config,
        half_precision_autocast=autocast,
        num_epochs=1,
    )
    assert side.on_all_ranks(train) == [expected]


def test_a_module_that_needs_autocast_is_told_of_the_key(
    expect_message: Callable[[str], None],
) -> None:
    side = Side(WithPositions, batches, 2, deepspeed_config=BF16, half_precision_autocast=False)
    (message,) = side.on_all_ranks(error_of_training)
    expect_message(re.sub(r"\(.*\)", "(PyTorch's message)", message))


class Copies(TrainerCallback):
    """Copies the model and a module of it, and changes the copies."""

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            batch, before = batches(0)[0], trainer.model(**batches(0)[0])["loss"]
            model, inner = copy.deepcopy(trainer.model), copy.deepcopy(trainer.model.inner)
            assert model(**batch)["loss"] == before
            for parameter in [*model.parameters(), *inner.parameters()]:
                parameter.zero_()
            assert model(**batch)["loss"] != before
            assert not inner(input_ids=batch["input_ids"]).last_hidden_state.any()
            assert trainer.model(**batch)["loss"] == before


@pytest.mark.parametrize("stage", [0, 2])
def test_copies_compute_with_their_own_weights(stage: int) -> None:
    side = Side(
        OfTransformers,
        batches,
        stage,
        deepspeed_config=BF16,
        callbacks=lambda: [Copies("")],
        half_precision_autocast="auto",
        num_epochs=1,
    )
    side.train()
