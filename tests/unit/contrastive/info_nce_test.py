"""The loss in blocks, against the matrix of similarities."""

from typing import Tuple
from unittest import mock

import pytest
import torch

from allennlp_deepspeed.models.contrastive import info_nce as module
from allennlp_deepspeed.models.contrastive.bi_encoder import Pairs
from allennlp_deepspeed.models.contrastive.info_nce import info_nce

QUERY_IDS = [1, 2, 3, 3, 4, 5, 6, 7, 7, 7]
DOCUMENT_IDS = [1, 2, 3, 4, 4, 5, 6, 7, 8, 2]
# Some are in no pair, some in one or two, some aren't there.
NEGATIVE_IDS = [0, 3, 20, 4, 21, 0, 2, 8]


def test_what_belongs_together_is_what_is_paired():
    *_, pairs = examples(len(NEGATIVE_IDS))
    paired = set(zip(QUERY_IDS, DOCUMENT_IDS))
    for i in range(len(QUERY_IDS)):
        is_positive, is_left_out = (part[0].tolist() for part in pairs.relate_query(i, i + 1))
        query = QUERY_IDS[i]
        assert is_positive == [
            *((query, document) in paired for document in DOCUMENT_IDS),
            *(False for _ in NEGATIVE_IDS),
        ]
        assert is_left_out == [
            *(False for _ in DOCUMENT_IDS),
            *(document == 0 or (query, document) in paired for document in NEGATIVE_IDS),
        ]
        is_positive, is_left_out = (part[0].tolist() for part in pairs.relate_document(i, i + 1))
        assert is_positive == [(query, DOCUMENT_IDS[i]) in paired for query in QUERY_IDS]
        assert not any(is_left_out)


def plain_info_nce(
    anchors: torch.Tensor, candidates: torch.Tensor, scale: torch.Tensor, pairs: Pairs
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


def examples(num_negatives: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, Pairs]:
    generator = torch.Generator().manual_seed(5)

    def draw(num_rows: int) -> torch.Tensor:
        rows = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(rows).requires_grad_()

    negative_ids = torch.tensor(NEGATIVE_IDS) if num_negatives else None
    pairs = Pairs(torch.tensor(QUERY_IDS), torch.tensor(DOCUMENT_IDS), negative_ids)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    return draw(10), draw(10 + num_negatives), scale, pairs


@pytest.mark.parametrize("num_negatives, block_elements", [(0, 1), (8, 40), (8, 10_000)])
def test_loss_and_gradients_are_those_of_the_whole_matrix(num_negatives: int, block_elements: int):
    *tensors, pairs = examples(num_negatives)
    expected, expected_correct = plain_info_nce(*tensors, pairs)
    expected_gradients = torch.autograd.grad(3 * expected, tensors)
    rows = mock.patch.object(module, "LEAST_ROWS", 1)
    with rows, mock.patch.object(module, "BLOCK_ELEMENTS", block_elements):
        loss, num_correct = info_nce(*tensors, pairs.relate_query)
    gradients = torch.autograd.grad(3 * loss, tensors)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert int(num_correct) == expected_correct
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_parts_add_up_to_the_whole():
    *tensors, pairs = examples(8)
    whole, num_correct = info_nce(*tensors, pairs.relate_query)
    parts = [info_nce(*tensors, pairs.relate_query, slice(*rows)) for rows in ((0, 4), (4, 10))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)
    assert sum(int(part.num_correct) for part in parts) == int(num_correct)
    expected = torch.autograd.grad(whole, tensors)
    gradients = torch.autograd.grad(sum(part.loss for part in parts), tensors)
    for gradient, expected_gradient in zip(gradients, expected):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_half_precision_is_converted_before_anything_is_multiplied():
    *tensors, pairs = examples(0)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = info_nce(*halves, pairs.relate_query)
    expected, _ = plain_info_nce(*(half.detach().float() for half in halves), pairs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(loss, halves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3
