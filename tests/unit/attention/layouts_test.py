"""What DeepSpeed's layouts were, as pictures: a row is a block of queries, a column one of keys."""

from typing import Any, Dict, List

import pytest
import torch

from allennlp_deepspeed.models.attention import BlockSparseAttention


def layout(**section: Any) -> Any:
    return BlockSparseAttention.from_section(section).layout


def picture(blocks: torch.Tensor) -> List[str]:
    return ["".join("#" if is_attended else "." for is_attended in row) for row in blocks]


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"mode": "fixed", "num_local_blocks": 2}, ["##.#.", "##.#.", ".###.", ".###.", ".#.##"]),
        (
            {"mode": "fixed", "num_local_blocks": 2, "attention": "unidirectional"},
            ["#....", "##...", ".##..", ".###.", ".#.##"],
        ),
        (
            {"mode": "fixed", "num_local_blocks": 2, "horizontal_global_attention": True},
            ["##.#.", "#####", ".###.", "#####", ".#.##"],
        ),
        (
            {"mode": "bigbird", "num_random_blocks": 0},
            ["#####", "###..", "####.", "#.###", "#..##"],
        ),
        (
            {"mode": "bslongformer", "global_block_indices": [4]},
            ["##..#", "###.#", ".####", "..###", "#####"],
        ),
        (
            {
                "mode": "bslongformer",
                "num_sliding_window_blocks": 1,
                "global_block_indices": [1],
                "global_block_end_indices": [3],
            },
            ["###..", "#####", "#####", ".###.", ".##.#"],
        ),
        ({"mode": "dense"}, ["#####"] * 5),
    ],
)
def test_layouts_are_those_of_deepspeed(section: Dict[str, Any], expected: List[str]):
    (blocks,) = layout(**section).blocks(5, num_heads=3)
    assert picture(blocks) == expected


def test_heads_have_other_global_blocks():
    fixed = layout(
        mode="fixed",
        num_local_blocks=2,
        num_different_global_patterns=2,
        different_layout_per_head=True,
    )
    last, first, again = map(picture, fixed.blocks(4, num_heads=3))
    assert last == ["##.#", "##.#", ".###", ".###"]
    assert first == ["###.", "###.", "#.##", "#.##"]
    assert again == last


@pytest.mark.parametrize(
    "mode, attention", [("bigbird", "bidirectional"), ("bigbird", "unidirectional")]
)
def test_random_blocks_come_from_the_seed_and_nothing_else(mode: str, attention: str):
    def draw(seed: int, layer: int, per_head: bool = True, num_random_blocks: int = 2) -> Any:
        torch.manual_seed(seed + layer)
        return layout(
            mode=mode,
            attention=attention,
            different_layout_per_head=per_head,
            num_random_blocks=num_random_blocks,
            seed=seed,
            max_length=16 * 20,
        ).blocks(20, num_heads=3, layer=layer)

    blocks = draw(seed=1, layer=0)
    assert torch.equal(draw(seed=1, layer=0), blocks)
    assert not torch.equal(draw(seed=2, layer=0), blocks)
    assert not torch.equal(draw(seed=1, layer=1), blocks)
    assert not torch.equal(blocks[0], blocks[1])
    assert draw(seed=1, layer=0, per_head=False).shape == (1, 20, 20)
    without = draw(seed=1, layer=0, num_random_blocks=0)
    assert torch.equal(without & blocks, without.expand_as(blocks))
    assert 0 < (blocks & ~without).sum(-1).max() <= 2


def test_the_random_blocks_of_a_seed_never_change():
    """Archives count on it."""
    bigbird = layout(mode="bigbird", num_global_blocks=0, num_sliding_window_blocks=1, seed=7)
    (blocks,) = bigbird.blocks(128, num_heads=1, layer=1)
    columns = [row.nonzero().flatten().tolist() for row in blocks[:4]]
    assert columns == [[0, 127], [1, 114], [2, 44], [3, 61]]


@pytest.mark.parametrize(
    "attention, window, num_global_tokens",
    [("bidirectional", 5, 3), ("unidirectional", 8, 0), ("unidirectional", 9, 9)],
)
def test_a_window_counts_tokens(attention: str, window: int, num_global_tokens: int):
    window_layout = layout(
        mode="sliding_window",
        block=8,
        window=window,
        num_global_tokens=num_global_tokens,
        attention=attention,
    )
    position = torch.arange(40)
    tokens = window_layout.tokens(position[:, None], position)
    blocks = window_layout.blocks(5, num_heads=1)[0]
    attended = tokens & blocks.repeat_interleave(8, 0).repeat_interleave(8, 1)
    for query in range(40):
        for key in range(40):
            expected = (abs(query - key) <= window or min(query, key) < num_global_tokens) and not (
                attention == "unidirectional" and key > query
            )
            assert attended[query, key] == expected
