"""
An archive of adapters only has the weights of its training after loading, or is refused by name.
"""

import json
from pathlib import Path
from typing import Any, Dict, Optional

import deepspeed
import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.fixtures.tiny_lm import LLAMA
from tests.integration.language_model_test import batches
from tests.support.experiment import FP16, StateDict, assert_same_weights
from tests.support.side_by_side import Side, error_of_training

FROZEN = "transformer.model.norm.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("base")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return str(directory)


def arguments(base: str, **lora: Any) -> Dict[str, Any]:
    return {
        "model_name": base,
        "lora": {"r": 2, "target_modules": ["q_proj"], **lora},
        "save_adapters_only": True,
    }


def side(model: Dict[str, Any], stage: int = 0, **others: Any) -> Side:
    return Side(
        lambda: CausalLM(Vocabulary(), **model), lambda rank: batches(57, rank), stage, **others
    )


def train(model: Dict[str, Any], directory: Path, **others: Any) -> StateDict:
    Vocabulary().save_to_files(str(directory / "vocabulary"))
    return side(model, **others).train(directory)


def load(model: Dict[str, Any], directory: Path) -> Model:
    # As in a file, because loading changes it.
    config = json.loads(json.dumps({"model": {"type": "causal_lm", **model}}))
    return Model.load(Params(config), str(directory))


class Change(TrainerCallback):
    def __init__(self, change: Any) -> None:
        super().__init__("")
        self._change = change

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        with trainer.modified_weights():
            self._change(dict(trainer.model.named_parameters()))


def change_frozen(parameters: Dict[str, torch.nn.Parameter]) -> None:
    parameters[FROZEN].data.mul_(1.5)


class ChangeData(Change):
    """Changes weights of which no file is saved, where it isn't noticed as it happens."""

    def on_epoch(self, trainer: Any, *args: Any, epoch: int, **kwargs: Any) -> None:
        if epoch == 1:
            self._change(dict(trainer.model.named_parameters()))

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        pass


def change_adapters(parameters: Dict[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if "lora_B" in name:
            parameter.data.add_(0.5)


@pytest.mark.parametrize(
    "key, stage, world_size",
    [
        ("model.save_adapters_only", 0, 1),
        ("model.save_adapters_only", 3, 2),
        ("trainer.checkpointer.exclude_frozen_parameters", 2, 1),
    ],
)
def test_a_change_of_parameters_that_are_not_saved_is_an_error(
    base: str, tmp_path: Path, key: str, stage: int, world_size: int
) -> None:
    is_archived = key != "model.save_adapters_only"
    checkpointer: Optional[DeepSpeedCheckpointer] = None
    if is_archived:
        checkpointer = DeepSpeedCheckpointer(str(tmp_path), exclude_frozen_parameters=True)
    changed = side(
        {**arguments(base), "save_adapters_only": not is_archived},
        stage,
        world_size=world_size,
        callbacks=lambda: [Change(change_frozen)],
        checkpointer=checkpointer,
    )
    (message,) = set(changed.on_all_ranks(error_of_training, tmp_path))
    assert message.startswith("ConfigurationError") and f"'{key}'" in message
    assert f"'{FROZEN}'" in message


def change_frozen_shards(parameters: Dict[str, torch.nn.Parameter]) -> None:
    with deepspeed.zero.GatheredParameters([parameters[FROZEN]], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameters[FROZEN].data.mul_(1.5)


@pytest.mark.parametrize(
    "stage, change", [(0, change_frozen), (2, change_frozen), (3, change_frozen_shards)]
)
def test_a_change_outside_modified_weights_is_an_error_when_it_is_not_saved(
    base: str, tmp_path: Path, stage: int, change: Any
) -> None:
    changed = side(
        arguments(base),
        stage,
        num_epochs=3,
        world_size=2 if stage == 3 else 1,
        callbacks=lambda: [ChangeData(change)],
    )
    for message in changed.on_all_ranks(error_of_training, tmp_path):
        assert message.startswith("ConfigurationError") and f"'{FROZEN}'" in message


@pytest.mark.parametrize("stage, of_engine", [(0, {}), (3, {"bf16": {"enabled": True}})])
def test_changed_adapters_are_archived(
    base: str, tmp_path: Path, stage: int, of_engine: Dict[str, Any]
) -> None:
    callbacks = {"callbacks": lambda: [Change(change_adapters)]}
    weights = train(arguments(base), tmp_path, stage=stage, deepspeed_config=of_engine, **callbacks)
    adapter = next(weight for name, weight in weights.items() if "lora_B" in name)
    assert adapter.min() > 1, "Which training alone doesn't reach."
    assert_same_weights(load(arguments(base), tmp_path).state_dict(), weights, tolerance=0)


def test_weights_that_the_pretrained_model_lacks_are_refused(tmp_path: Path) -> None:
    AutoModel.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(tmp_path / "base")
    model = arguments(str(tmp_path / "base"))
    with pytest.raises(ConfigurationError, match=r"'model\.save_adapters_only'.*lm_head\.weight"):
        CausalLM(Vocabulary(), **model)
    CausalLM(Vocabulary(), **{**model, "save_adapters_only": False})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_that_training_rounds_twice_are_rounded_twice_at_loading(
    base: str, tmp_path: Path, dtype: str
) -> None:
    model = {**arguments(base), "transformer_kwargs": {"dtype": dtype}}
    # Partitioning rounds the adapters too, which would be refused in another precision.
    weights = train(
        model, tmp_path, stage=3, deepspeed_config=FP16, is_constructed_partitioned=True
    )
    loaded = load(model, tmp_path).state_dict()
    assert {weight.dtype for weight in loaded.values()} == {torch.float32}
    assert_same_weights(loaded, weights, tolerance=0)


def test_weights_that_only_the_archive_or_the_model_has_are_refused(
    base: str, tmp_path: Path
) -> None:
    for name in ("with", "without"):
        train(arguments(base, use_dora=name == "with"), tmp_path / name)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lora_magnitude_vector"):
        load(arguments(base), tmp_path / "with")
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_magnitude_vector"):
        load(arguments(base, use_dora=True), tmp_path / "without")
    wrong = {**arguments(base), "loss_chunk_size": 0}
    with pytest.raises(ConfigurationError) as error:
        load(wrong, tmp_path / "without")
    assert "loss_chunk_size" in str(error.value) and "model_name" not in str(error.value)


def test_adapters_of_a_part_of_a_model_are_refused(base: str) -> None:
    class Outer(Model):
        def __init__(self) -> None:
            super().__init__(Vocabulary())
            self.inner = CausalLM(self.vocab, **arguments(base))

    message = Side(Outer, lambda rank: batches(57), 0).refusal()
    assert "'save_adapters_only'" in message and "'inner'" in message
