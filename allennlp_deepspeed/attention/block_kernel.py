"""
Block-sparse attention by PyTorch's own operators, on any device, forward and backward: a group of
blocks of queries after another, each with the blocks of keys that it attends to. As in
"FlashAttention" (Dao et al., 2022, https://arxiv.org/abs/2205.14135, section 3.1), what is kept for
the backward pass are the results and the logarithms of the softmax's denominators, from which it
computes the weights again; so the memory grows with the length, and not with its square.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch

from allennlp_deepspeed.attention.layouts import Layout

# Of the scores that are in memory at a time: few stay in a CPU's cache, many keep a GPU busy. A
# block of queries that attends to all may have more.
MAX_SCORES_ON_CPU = 2**19
MAX_SCORES = 2**24


class Rows(NamedTuple):
    """
    Blocks of queries that attend to equally many blocks of keys.

    # Parameters

    queries : `torch.LongTensor`
        Shape (num_rows,), indices into the blocks of all heads that have layouts of their own.
    keys : `torch.LongTensor`
        Shape (num_rows, num_keys), as well.
    """

    queries: torch.Tensor
    keys: torch.Tensor


class Plan:
    """
    A layout, as rows to compute.

    # Parameters

    layout : `Layout`
    blocks : `torch.BoolTensor`
        Shape (num_layouts, num_blocks, num_blocks), as `Layout.blocks` gives it.
    device : `torch.device`
    """

    def __init__(self, layout: Layout, blocks: torch.Tensor, device: torch.device) -> None:
        self.num_layouts, self.num_blocks, _ = blocks.shape
        self._layout = layout
        counts = blocks.sum(-1).flatten()
        self._rows: List[Rows] = []
        self._max_scores = MAX_SCORES_ON_CPU if device.type == "cpu" else MAX_SCORES
        for count in counts.unique().tolist():
            if count > 0:
                queries = (counts == count).nonzero().squeeze(-1)
                keys = blocks.flatten(0, 1)[queries].nonzero()[:, 1].view(-1, count)
                first = queries // self.num_blocks * self.num_blocks
                self._rows.append(Rows(queries.to(device), (keys + first[:, None]).to(device)))

    def rows(self, scores_of_block: int) -> Iterator[Rows]:
        """
        # Parameters

        scores_of_block : `int`
            How many there are where a block of queries attends to one block of keys.
        """
        for queries, keys in self._rows:
            size = max(1, self._max_scores // (scores_of_block * keys.size(1)))
            yield from map(Rows, queries.split(size), keys.split(size))

    def allowed(self, rows: Rows, key_mask: torch.Tensor) -> torch.Tensor:
        """
        # Parameters

        rows : `Rows`
        key_mask : `torch.BoolTensor`
            Shape (batch_size, num_blocks * block).

        # Returns

        `torch.BoolTensor`
            Shape (batch_size, 1, num_rows, block or 1, num_keys * block): who attends to whom.
        """
        queries, keys = (self._positions(part % self.num_blocks) for part in rows)
        # Shape: (batch_size, 1, num_rows, 1, num_keys * block)
        allowed = key_mask[:, keys][:, None, :, None]
        tokens = self._layout.tokens(queries[:, :, None], keys[:, None])
        return allowed if tokens is None else allowed & tokens

    def _positions(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of the tokens in blocks. Shape: (num_rows, number of blocks in a row * block)"""
        block = self._layout.block
        within = torch.arange(block, device=blocks.device)
        return (blocks.view(len(blocks), -1, 1) * block + within).flatten(1)


# Of loops whose lengths depend on the layout there is nothing to gain by compiling.
@torch.compiler.disable
def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    plan: Plan,
    scale: float,
) -> torch.Tensor:
    """
    # Parameters

    query, key, value : `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim), with a length that is a multiple of the
        block's.
    key_mask : `torch.BoolTensor`
        Shape (batch_size, length): which tokens may be attended to.
    plan : `Plan`
    scale : `float`
        By which scores are multiplied.

    # Returns

    `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim), and 0 for who attends to nobody.
    """
    result = _Attention.apply(
        *(_in_blocks(tensor, plan) for tensor in (query, key, value)), key_mask, plan, scale
    )
    return result.view_as(query)


class _Attention(torch.autograd.Function):
    """Of tensors of shape (batch_size, heads of a layout, blocks, block, head_dim)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor,
        plan: Plan,
        scale: float,
    ) -> torch.Tensor:
        result = torch.zeros_like(query)
        normalizer = torch.zeros(query.shape[:-1], dtype=_precise(query), device=query.device)
        for rows in plan.rows(_scores_of_block(query)):
            scores = _scores(query, key, key_mask, plan, rows, scale)
            # Who attends to nobody has only scores of -inf, of which no softmax can be made.
            denominator = scores.logsumexp(-1).clamp_(min=torch.finfo(scores.dtype).min)
            weights = scores.sub_(denominator[..., None]).exp_()
            result[:, :, rows.queries] = (weights @ _gather(value, rows.keys)).to(result.dtype)
            normalizer[:, :, rows.queries] = denominator
        ctx.save_for_backward(query, key, value, key_mask, result, normalizer)
        ctx.plan, ctx.scale = plan, scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> Tuple[Optional[torch.Tensor], ...]:
        query, key, value, key_mask, result, normalizer = ctx.saved_tensors
        query_gradient, key_gradient, value_gradient = (
            torch.zeros_like(tensor, dtype=_precise(tensor)) for tensor in (query, key, value)
        )
        for rows in ctx.plan.rows(_scores_of_block(query)):
            queries, keys = rows
            scores = _scores(query, key, key_mask, ctx.plan, rows, ctx.scale)
            weights = scores.sub_(normalizer[:, :, queries][..., None]).exp_()
            of_result = _gather(gradient, queries[:, None])
            _add(value_gradient, keys, weights.transpose(-1, -2) @ of_result)
            of_weights = of_result @ _gather(value, keys).transpose(-1, -2)
            mean = (of_result * _gather(result, queries[:, None])).sum(-1, keepdim=True)
            of_scores = of_weights.sub_(mean).mul_(weights).mul_(ctx.scale)
            query_gradient[:, :, queries] = of_scores @ _gather(key, keys)
            of_keys = of_scores.transpose(-1, -2) @ _gather(query, queries[:, None])
            _add(key_gradient, keys, of_keys)
        gradients = (query_gradient, key_gradient, value_gradient)
        return *(g.to(t.dtype) for g, t in zip(gradients, (query, key, value))), None, None, None


def _in_blocks(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The heads that have layouts of their own are beside each other, as more blocks."""
    batch_size, num_heads, length, head_dim = tensor.shape
    heads = num_heads // plan.num_layouts
    blocks = plan.num_layouts * plan.num_blocks
    return tensor.reshape(batch_size, heads, blocks, length // plan.num_blocks, head_dim)


def _precise(tensor: torch.Tensor) -> torch.dtype:
    """Half precision is for what is kept, not for sums."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _scores_of_block(query: torch.Tensor) -> int:
    return query.size(0) * query.size(1) * query.size(3) ** 2


def _gather(tensor: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """
    # Parameters

    tensor : `torch.Tensor`
        Shape (batch_size, heads, blocks, block, head_dim).
    blocks : `torch.LongTensor`
        Shape (num_rows, number).

    # Returns

    `torch.Tensor`
        Shape (batch_size, heads, num_rows, number * block, head_dim).
    """
    gathered = tensor.index_select(2, blocks.flatten()).to(_precise(tensor))
    return gathered.view(*tensor.shape[:2], len(blocks), -1, tensor.size(-1))


def _add(total: torch.Tensor, blocks: torch.Tensor, addend: torch.Tensor) -> None:
    """Where `_gather` takes from."""
    total.index_add_(2, blocks.flatten(), addend.view(*total.shape[:2], -1, *total.shape[3:]))


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor,
    plan: Plan,
    rows: Rows,
    scale: float,
) -> torch.Tensor:
    """Shape: (batch_size, heads, num_rows, block, num_keys * block)"""
    queries = _gather(query, rows.queries[:, None]) * scale
    scores = queries @ _gather(key, rows.keys).transpose(-1, -2)
    return scores.masked_fill_(~plan.allowed(rows, key_mask), -torch.inf)
