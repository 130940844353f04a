"""Pretrained transformers with block-sparse attention, beside themselves with a dense mask."""

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
import transformers
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.modules import TokenEmbedder
from transformers import AutoConfig, AutoModel

from allennlp_deepspeed.models.attention import BlockSparseAttention
from allennlp_deepspeed.models.attention.block_sparse_pretrained_transformer import TESTED
from tests.fixtures.dense_attention import dense_mask
from tests.fixtures.tiny_bert import tiny_bert

LENGTHS = [23, 9, 16]
CAUSAL = ("gpt2", "llama", "qwen3")
SIZES: Dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
BIGBIRD = {"mode": "bigbird", "block": 2, "different_layout_per_head": True, "max_length": 32}


def section(model_type: str = "bert") -> Dict[str, Any]:
    attention = "unidirectional" if model_type in CAUSAL else "bidirectional"
    return {"type": "block_sparse", "attention": attention, **BIGBIRD}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert(tmp_path_factory.mktemp("model") / "tiny_bert")


def write_model(model_type: str, directory: Path, bert: str) -> str:
    """With the tokenizer of another model, since an embedder looks for one."""
    sizes = dict(SIZES)
    if model_type in ("llama", "qwen3"):
        sizes.update(num_key_value_heads=2, head_dim=8)
    if model_type == "distilbert":
        sizes.update(dim=32, hidden_dim=40, n_layers=2, n_heads=4)
    torch.manual_seed(1)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))
    for parameter in model.parameters():
        # Larger than they are at first, so that attention is to some and not to all alike.
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (Path(bert) / name).exists():
            (directory / name).write_bytes((Path(bert) / name).read_bytes())
    return str(directory)


def embedder(model_name: str, attention: Dict[str, Any], **more: Any) -> TokenEmbedder:
    config = AutoConfig.from_pretrained(model_name)
    dropout = {
        key: 0.0
        for key in ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
        if hasattr(config, key)
    }
    parameters = {
        "type": "block_sparse_pretrained_transformer",
        "model_name": model_name,
        "attention": attention,
        "transformer_kwargs": dropout,
        **more,
    }
    return TokenEmbedder.from_params(Params(parameters))


def dense_model(model_name: str, like: torch.nn.Module, implementation: str) -> torch.nn.Module:
    model = AutoModel.from_pretrained(model_name, attn_implementation=implementation)
    # For the tokenizer's vocabulary, the embedder has changed the number of embeddings.
    model.resize_token_embeddings(like.get_input_embeddings().num_embeddings)
    model.load_state_dict(like.state_dict())
    return model.eval()


def register_masked_attention(attention: Dict[str, Any], mask: torch.Tensor) -> str:
    """
    Dense attention with the mask that the section stands for.

    # Returns

    `str`
        As what transformers know it.
    """
    sparse = BlockSparseAttention.from_section(attention)
    # In the order in which they attend, whatever number models give them.
    layers: Dict[int, int] = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.size(1) // key.size(1)
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        layer = layers.setdefault(id(module), len(layers))
        allowed = dense_mask(sparse, query.size(2), query.size(1), layer) & mask[:, None, None]
        scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("masked_in_tests", attend)
    return "masked_in_tests"


@pytest.mark.parametrize("model_type", TESTED)
def test_embeddings_and_gradients_are_those_of_dense_attention(
    model_type: str, tmp_path: Path, bert: str
) -> None:
    model_name = write_model(model_type, tmp_path / model_type, bert)
    sparse = embedder(model_name, section(model_type)).eval()
    token_ids = torch.randint(5, 50, (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    masked = register_masked_attention(section(model_type), mask)
    dense = dense_model(model_name, sparse.transformer_model, masked)
    full = dense_model(model_name, sparse.transformer_model, "eager")
    results = [
        sparse(token_ids, mask),
        dense(input_ids=token_ids, attention_mask=mask.float()).last_hidden_state,
        full(input_ids=token_ids, attention_mask=mask.float()).last_hidden_state,
    ]
    actual, expected, of_all = (result[mask] for result in results)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert (actual - of_all).abs().max() > 0.01
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: p.grad for name, p in sparse.transformer_model.named_parameters()}
    for name, parameter in dense.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            difference = (gradients[name] - parameter.grad).norm()
            assert difference <= 1e-3 * parameter.grad.norm() + 1e-4, name


def refused(*arguments: Any, **more: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        transformer = embedder(*arguments, **more)
        transformer(torch.ones(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.bool))
    return str(refusal.value)


def test_dropout_of_attention_weights_is_refused(tmp_path: Path) -> None:
    message = refused(tiny_bert(tmp_path / "bert"), section(), transformer_kwargs={})
    assert "The model's 'attention_probs_dropout_prob' is 0.1" in message
    assert '"transformer_kwargs": {"attention_probs_dropout_prob": 0}' in message


def test_a_model_that_is_not_tested_is_refused(tmp_path: Path, bert: str) -> None:
    model_name = write_model("mpnet", tmp_path / "mpnet", bert)
    assert "isn't tested with models of type 'mpnet'" in refused(model_name, section())


def test_a_bidirectional_layout_of_a_causal_model_is_refused(tmp_path: Path, bert: str) -> None:
    model_name = write_model("llama", tmp_path / "llama", bert)
    assert "is causal" in refused(model_name, section("bert"))
