"""InfoNCE loss without a materialized similarity matrix."""

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override

Relation = Callable[[int, int], Tuple[torch.Tensor, torch.Tensor]]
"""
Relation of a range of anchors to all candidates. Given a start and an (exclusive) stop index, it
returns two boolean tensors of shape (stop - start, num_candidates): which candidates are positives,
and which are neither positives nor negatives.
"""

BLOCK_ELEMENTS = 2**19  # similarities that are in memory at a time
LEAST_ROWS = 64  # at least this number of anchors a block, since each block reads all candidates


class InfoNCE(NamedTuple):
    """
    The loss of a batch. With `rows`, both values are for these anchors.

    # Parameters

    loss : `torch.Tensor`
        A scalar.
    num_correct : `torch.Tensor`
        A scalar: the number of anchors whose most similar candidate is a positive.
    """

    loss: torch.Tensor
    num_correct: torch.Tensor


def info_nce(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    scale: torch.Tensor,
    relation: Relation,
    rows: Optional[slice] = None,
) -> InfoNCE:
    """
    Computes InfoNCE of [van den Oord et al., 2018](https://arxiv.org/abs/1807.03748), section 2.3,
    averaged over the anchors. For an anchor with several positives it is the average over them, as
    in L_out of [Khosla et al., 2020](https://arxiv.org/abs/2004.11362), equation 2.

    Similarities are computed for a block of anchors at a time. Gradients are computed in the
    forward pass, block by block: the loss is a scalar, so the incoming gradient only scales them.
    The memory is twice that of the arguments.

    # Parameters

    anchors : `torch.Tensor`, required.
        Shape (num_anchors, dim). Anchors and candidates are converted to fp32.
    candidates : `torch.Tensor`, required.
        Shape (num_candidates, dim).
    scale : `torch.Tensor`, required.
        A scalar that multiplies the dot products: the inverse of the temperature.
    relation : `Relation`, required.
        Every anchor has at least one positive.
    rows : `slice`, optional (default = `None`)
        The anchors whose losses are computed: their sum is divided by the number of all anchors.
        `None` means all.
    """
    if rows is None:
        rows = slice(0, len(anchors))
    tensors = (anchors.float(), candidates.float(), scale.float())
    if not torch.is_grad_enabled():
        tensors = tuple(tensor.detach() for tensor in tensors)
    return InfoNCE(*_InfoNCE.apply(*tensors, relation, rows))


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        scale: torch.Tensor,
        relation: Any,
        own: slice,
    ) -> Any:
        with torch.autocast(anchors.device.type, enabled=False):
            block_size = max(LEAST_ROWS, BLOCK_ELEMENTS // len(candidates))
            loss = anchors.new_zeros(())
            num_correct = torch.zeros((), dtype=torch.int64, device=anchors.device)
            has_gradients = any(ctx.needs_input_grad)
            gradients = []
            if has_gradients:
                gradients = [torch.zeros_like(tensor) for tensor in (anchors, candidates)]
                # It is summed over all similarities, hence float64.
                gradients.append(torch.zeros_like(scale, dtype=torch.float64))
            for start in range(own.start, own.stop, block_size):
                rows = slice(start, min(start + block_size, own.stop))
                # Shape: (block_size, num_candidates), as all tensors of the block.
                similarities = anchors[rows] @ candidates.T
                is_positive, is_left_out = relation(rows.start, rows.stop)
                logits = (similarities * scale).masked_fill_(is_left_out, -torch.inf)
                log_sum = logits.logsumexp(dim=1, keepdim=True)
                num_positives = is_positive.sum(dim=1, keepdim=True)
                positives = torch.where(is_positive, logits, 0).sum(dim=1) / num_positives[:, 0]
                loss += (log_sum[:, 0] - positives).sum()
                num_correct += is_positive.gather(1, logits.argmax(dim=1, keepdim=True)).sum()
                if has_gradients:
                    # Gradient of each row's loss with respect to its logits.
                    by_logits = logits.sub_(log_sum).exp_().sub_(is_positive / num_positives)
                    gradients[2] += similarities.mul_(by_logits).sum(dtype=torch.float64)
                    by_similarities = by_logits.mul_(scale)
                    gradients[0][rows] = by_similarities @ candidates
                    gradients[1].addmm_(by_similarities.T, anchors[rows])
        if has_gradients:
            gradients = [gradient.div_(len(anchors)) for gradient in gradients]
            ctx.save_for_backward(*gradients[:2], gradients[2].to(scale.dtype))
        ctx.mark_non_differentiable(num_correct)
        return loss / len(anchors), num_correct

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, by_loss: torch.Tensor, _: Any) -> Any:
        return (*(by_loss * gradient for gradient in ctx.saved_tensors), None, None)
