"""The loss in blocks, against the matrix of similarities."""

from typing import Tuple
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from allennlp_deepspeed.contrastive import info_nce as module
from allennlp_deepspeed.contrastive.bi_encoder import _Pairs
from allennlp_deepspeed.contrastive.info_nce import info_nce
from tests.tensor_memory import TensorMemory


def plain_info_nce(
    anchors: torch.Tensor, candidates: torch.Tensor, scale: torch.Tensor, pairs: _Pairs
) -> Tuple[torch.Tensor, int]:
    """As it is written down, with autograd."""
    is_positive, is_left_out = pairs.relate_query(0, len(anchors))
    logits = (anchors @ candidates.T * scale).masked_fill(is_left_out, -torch.inf)
    log_probabilities = logits.log_softmax(dim=1)
    losses = []
    num_correct = 0
    for row, positives in zip(log_probabilities, is_positive):
        losses.append(-row[positives].mean())
        num_correct += int(positives[row.argmax()])
    return torch.stack(losses).mean(), num_correct


def examples(num_negatives: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Pairs]:
    generator = torch.Generator().manual_seed(5)

    def draw(num_rows: int) -> torch.Tensor:
        rows = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(rows).requires_grad_()

    pairs = _Pairs(
        torch.tensor([1, 2, 3, 3, 4, 5, 6, 7, 7, 7]),
        torch.tensor([1, 2, 3, 4, 4, 5, 6, 7, 8, 9]),
    )
    # Some are there in no list, some are a query's own document.
    pairs.negative_ids = torch.tensor([0, 3, 20, 4, 21, 0, 5, 22])[:num_negatives]
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    return draw(10), draw(10 + num_negatives), scale, pairs


@pytest.mark.parametrize("num_negatives", [0, 8])
@pytest.mark.parametrize("block_elements", [1, 40, 10_000], ids="{} similarities".format)
def test_loss_and_gradients_are_those_of_the_whole_matrix(num_negatives: int, block_elements: int):
    *tensors, pairs = examples(num_negatives)
    expected, expected_correct = plain_info_nce(*tensors, pairs)
    expected_gradients = torch.autograd.grad(3 * expected, tensors)
    with mock.patch.object(module, "_BLOCK_ELEMENTS", block_elements):
        loss, num_correct = info_nce(*tensors, pairs.relate_query)
    gradients = torch.autograd.grad(3 * loss, tensors)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert int(num_correct) == expected_correct
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_nothing_is_differentiated_where_no_gradient_is_wanted():
    *tensors, pairs = examples(0)
    with torch.no_grad(), mock.patch.object(torch.Tensor, "addmm_") as differentiate:
        loss, _ = info_nce(*tensors, pairs.relate_query)
    assert not loss.requires_grad
    differentiate.assert_not_called()


def test_half_precision_is_converted_before_anything_is_multiplied():
    *tensors, pairs = examples(0)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = info_nce(*halves, pairs.relate_query)
    expected, _ = plain_info_nce(*(half.detach().float() for half in halves), pairs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(loss, halves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3


def test_a_batch_of_65536_never_has_its_matrix():
    """With fake tensors, whose memory is counted as that of any other, and nothing is computed."""
    batch_size, dim = 65_536, 768
    # Larger blocks than are the default, and so fewer.
    blocks = mock.patch.object(module, "_BLOCK_ELEMENTS", 2**24)
    with blocks, FakeTensorMode(), TensorMemory() as memory:
        queries, documents = (torch.empty(batch_size, dim, requires_grad=True) for _ in range(2))
        ids = torch.empty(batch_size, dtype=torch.int64)
        scale = torch.empty((), requires_grad=True)
        pairs = _Pairs(ids, ids)
        info_nce(queries, documents, scale, pairs.relate_query).loss.backward()
    representations = 4 * 2 * batch_size * dim
    # They, their gradients twice (inside the loss, and multiplied by what comes back), and blocks.
    assert representations < memory.peak < 3 * representations + 16 * 2**24
    assert memory.peak < 4 * batch_size**2 / 10
