"""Block-sparse attention beside dense attention with the same mask."""

import shutil
from typing import Any, Dict, List, Tuple

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.modules import Seq2SeqEncoder
from torch.utils.checkpoint import checkpoint

from allennlp_deepspeed.models.attention import BlockSparseAttention
from allennlp_deepspeed.models.attention.block_sparse_attention import (
    SparseAttention,
    attend_with_flex_attention,
)
from tests.fixtures.dense_attention import dense_mask

LAYOUTS: Dict[str, Dict[str, Any]] = {
    "fixed": {"mode": "fixed", "num_local_blocks": 2},
    "patterns": {
        "mode": "fixed",
        "num_local_blocks": 2,
        "num_different_global_patterns": 2,
        "different_layout_per_head": True,
    },
    "unidirectional": {"mode": "fixed", "attention": "unidirectional"},
    "bigbird": {"mode": "bigbird", "different_layout_per_head": True, "max_length": 64},
    "bslongformer": {"mode": "bslongformer", "global_block_indices": [2]},
    "sliding_window": {"mode": "sliding_window", "window": 5, "num_global_tokens": 1},
    "dense": {"mode": "dense"},
}
LENGTHS = [37, 20, 0]  # of the sequences of a batch, one of which is nothing but padding
NUM_HEADS, HEAD_DIM, BLOCK, LAYER = 4, 8, 4, 1

each_layout = pytest.mark.parametrize("name", LAYOUTS)


def attention(name: str) -> BlockSparseAttention:
    section = {"type": "block_sparse", "block": BLOCK, **LAYOUTS[name]}
    return SparseAttention.from_params(Params(section))


def inputs(
    dtype: torch.dtype = torch.float64, lengths: List[int] = LENGTHS
) -> Tuple[List[torch.Tensor], torch.Tensor]:
    """Queries, keys and values, and the mask of who is there."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(lengths), NUM_HEADS, max(lengths), HEAD_DIM)
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]
    is_there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return [tensor.requires_grad_() for tensor in tensors], is_there


def mask_of(sparse: BlockSparseAttention, is_there: torch.Tensor) -> torch.Tensor:
    """Shape (batch_size, num_heads, length, length)."""
    return dense_mask(sparse, is_there.size(1), NUM_HEADS, LAYER) & is_there[:, None, None]


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) / HEAD_DIM**0.5
    # Where there is nobody to attend to, a softmax of -inf would be NaN.
    weights = scores.masked_fill(~mask, -1e9).softmax(-1) * mask
    return weights @ value


def gradients(result: torch.Tensor, tensors: List[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    return torch.autograd.grad((result.double() * weights).sum(), tensors)


def assert_as_dense(
    sparse: BlockSparseAttention,
    dtype: torch.dtype = torch.float64,
    lengths: List[int] = LENGTHS,
    **tolerance: float,
) -> None:
    tensors, is_there = inputs(dtype, lengths)
    result = sparse.attend(*tensors, is_there, LAYER)
    assert result.dtype == dtype
    precise = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = dense_attention(*precise, mask_of(sparse, is_there))
    torch.testing.assert_close(result.double(), expected, **tolerance)
    for actual, gradient in zip(gradients(result, tensors), gradients(expected, precise)):
        torch.testing.assert_close(actual.double(), gradient, **tolerance)


@each_layout
def test_results_and_gradients_are_those_of_dense_attention(name: str):
    assert_as_dense(attention(name))


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_in_other_precisions(dtype: torch.dtype, tolerance: float):
    assert_as_dense(attention("patterns"), dtype, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_computed_again_in_the_backward_pass(use_reentrant: bool):
    tensors, is_there = inputs()
    sparse = attention("bigbird")
    result = checkpoint(sparse.attend, *tensors, is_there, use_reentrant=use_reentrant)
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    (result * weights).sum().backward()
    for tensor, expected in zip(tensors, gradients(sparse.attend(*tensors, is_there), tensors)):
        torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bigbird", "sliding_window"])
def test_a_text_gets_the_same_however_far_its_batch_is_padded(name: str):
    tensors, is_there = inputs(lengths=[60, 21])
    together = attention(name).attend(*tensors, is_there)[1, :, :21]
    alone = [tensor[1:, :, :21] for tensor in tensors]
    result = attention(name).attend(*alone, is_there[1:, :21])
    torch.testing.assert_close(result[0], together, rtol=1e-12, atol=1e-12)


# --- flex_attention


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT" or shutil.which("g++") is None,
    reason="PyTorch compiles flex_attention for CPUs with AVX2 or newer only, with a C++ compiler",
)
def test_compiled_flex_attention_gives_the_same():
    """Forward only, of a length that is a multiple of its blocks: for CPUs PyTorch has no more."""
    layout = attention("sliding_window").layout
    if layout.length_limit is not None:
        layout = layout.model_copy(update={"max_length": 128})
    tensors, is_there = inputs(torch.float32, lengths=[128, 20, 0])
    query, key, value = (tensor.detach() for tensor in tensors)
    blocks = layout.blocks(128 // BLOCK, NUM_HEADS, LAYER)
    result = attend_with_flex_attention(query, key, value, is_there, layout, blocks, HEAD_DIM**-0.5)
    mask = mask_of(BlockSparseAttention(layout), is_there)
    expected = dense_attention(query, key, value, mask)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


# --- the section


@pytest.mark.parametrize(
    "section, message",
    [
        ({}, "'attention.mode' is None: write 'bigbird', 'bslongformer'"),
        ({"mode": "fixed", "block": 24}, "'attention.block' is 24: Input should be 1, 2, 4"),
        ({"mode": "fixed", "num_global_blocks": 3}, "num_local_blocks must be a multiple"),
        ({"mode": "fixed", "num_random_blocks": 1}, "'fixed' has no such key; remove it"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "different_layout_per_head"),
        (
            {"mode": "fixed", "attention": "unidirectional", "horizontal_global_attention": True},
            'horizontal_global_attention needs "attention": "bidirectional"',
        ),
        (
            {"mode": "bslongformer", "global_block_end_indices": [0]},
            "global_block_end_indices must have a larger number for each",
        ),
        ({"mode": "sliding_window"}, "'attention.window' is missing"),
        ({"mode": "fixed", "kernel": "blocks"}, "'attention.kernel' no longer exists"),
        (
            {"mode": "fixed", "dropout": 0.1},
            "'attention.dropout': flex_attention doesn't support dropout",
        ),
    ],
)
def test_what_is_no_section_is_refused(section: Dict[str, Any], message: str):
    with pytest.raises(ConfigurationError) as refusal:
        SparseAttention.from_params(Params({"type": "block_sparse", **section}))
    assert message in str(refusal.value)


def test_a_sequence_longer_than_random_blocks_are_drawn_from_is_refused():
    tensors, is_there = inputs(lengths=[65])
    with pytest.raises(ConfigurationError, match="has 65 tokens, .* is 64"):
        attention("bigbird").attend(*tensors, is_there)


# --- the encoder


def encoder(kind: str, **more: Any) -> Seq2SeqEncoder:
    torch.manual_seed(5)
    parameters = {
        "type": kind,
        "input_dim": 32,
        "num_layers": 2,
        "feedforward_hidden_dim": 24,
        "num_attention_heads": NUM_HEADS,
        "positional_encoding": "embedding",
        **more,
    }
    return Seq2SeqEncoder.from_params(Params(parameters))


@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_with_a_dense_layout_the_encoder_is_pytorch_transformer(mode: str):
    dense = encoder("pytorch_transformer", dropout_prob=0)
    after_dense = torch.rand(1)
    section = {"type": "block_sparse", "mode": "dense"}
    sparse = encoder("block_sparse_transformer", dropout_prob=0, attention=section)
    assert torch.equal(torch.rand(1), after_dense)
    torch.testing.assert_close(sparse.state_dict(), dense.state_dict(), rtol=0, atol=0)
    _, is_there = inputs(lengths=[37, 20])
    texts = torch.randn(2, 37, 32)
    results = []
    for module in (dense, sparse):
        module.train(mode == "train")
        with torch.set_grad_enabled(mode != "no_grad"):
            result = module(texts, is_there) * is_there[..., None]
        if mode != "no_grad":
            result.square().sum().backward()
        results.append(result)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    if mode != "no_grad":
        for actual, expected in zip(sparse.parameters(), dense.parameters()):
            if expected.grad is not None:
                torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-3)
