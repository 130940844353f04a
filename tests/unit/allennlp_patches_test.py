"""Each shim of `allennlp_deepspeed.allennlp_patches`, against what it works around."""

from pathlib import Path

import numpy as np
import pytest
import torch
from allennlp.common import Params
from allennlp.data import Instance, Vocabulary
from allennlp.data.data_loaders.data_collator import DataCollator
from allennlp.data.fields import TextField
from allennlp.data.token_indexers import PretrainedTransformerIndexer
from allennlp.data.tokenizers import PretrainedTransformerTokenizer
from allennlp.modules.seq2vec_encoders import CnnEncoder
from allennlp.nn.util import tiny_value_of_dtype
from allennlp.training.learning_rate_schedulers import LearningRateScheduler

from allennlp_deepspeed.checkpoint import serialization


def test_reduce_on_plateau_takes_a_list_of_minima():
    scheduler = LearningRateScheduler.from_params(
        Params({"type": "reduce_on_plateau", "min_lr": [0.1]}),
        optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0),
    )
    assert scheduler.lr_scheduler.min_lrs == [0.1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("scalar", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)])
def test_numpy_scalars_are_loaded_with_weights_only(tmp_path: Path, scalar):
    torch.save({"metric": scalar}, tmp_path / "state.th")
    assert torch.load(tmp_path / "state.th", weights_only=True) == {"metric": scalar}


def test_numpy_scalars_are_allowed_after_a_checkpoint_was_loaded_too(tmp_path: Path):
    torch.save({"metric": np.float64(0.5)}, tmp_path / "state.th")
    serialization.load(str(tmp_path / "state.th"))
    assert torch.load(tmp_path / "state.th", weights_only=True) == {"metric": 0.5}


def test_tiny_value_of_bf16_is_that_of_fp32():
    assert tiny_value_of_dtype(torch.bfloat16) == tiny_value_of_dtype(torch.float32)
    assert tiny_value_of_dtype(torch.half) == 1e-4
    with pytest.raises(TypeError):
        tiny_value_of_dtype(torch.long)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_texts_that_are_shorter_than_a_filter_have_the_features_of_fp32(dtype: torch.dtype):
    encoder = CnnEncoder(embedding_dim=5, num_filters=6, ngram_filter_sizes=(2, 3))
    tokens = torch.randn(2, 4, 5)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    expected = encoder(tokens, mask)
    assert not expected[1].any()
    with torch.autocast("cpu", dtype):
        features = encoder(tokens, mask)
    assert torch.allclose(features, expected, atol=0.03)
    assert not features[1].any()


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_tokens_are_masked_with_the_probability_of_the_config(tmp_path: Path, probability: float):
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special_tokens, "a", "b"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    collator = DataCollator.from_params(
        Params(
            {
                "type": "language_model",
                "model_name": str(tmp_path),
                "mlm_probability": probability,
                "filed_name": "text",
            }
        )
    )
    tokens = PretrainedTransformerTokenizer(str(tmp_path)).tokenize("a b a b")
    indexers = {"tokens": PretrainedTransformerIndexer(str(tmp_path))}
    instance = Instance({"text": TextField(tokens, indexers)})
    instance.index_fields(Vocabulary())
    labels = collator([instance])["text"]["tokens"]["labels"]
    assert (labels != -100).sum() == 4 * probability
