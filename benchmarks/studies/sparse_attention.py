"""
What block-sparse attention takes of time and memory beside dense attention.

Trains encoders of 2 layers, of width 256 with 4 heads of 64 dimensions, on one random sequence of
each length, in fp32 on one thread: AllenNLP's "pytorch_transformer", and "block_sparse_transformer"
with each layout. First the losses of each layout are compared with those of dense attention with
the mask that it stands for. Then each makes steps of forward pass, backward pass and SGD in turn
with "pytorch_transformer", which attends to all by PyTorch's fused kernel, and the ratio is that of
a pair. The peak of the memory is that of a process of its own; see `benchmarks.harness.memory`.
Writes a table and a plot to `benchmarks/results`.
"""

import argparse
import multiprocessing
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from allennlp.common import Params
from allennlp.modules import Seq2SeqEncoder

from allennlp_deepspeed.attention.block_sparse_attention import (
    BlockSparseAttention,
    SparseAttention,
)
from benchmarks.harness import losses, report
from benchmarks.harness.memory import PeakMemory
from benchmarks.harness.plot import figure

WIDTH, NUM_HEADS, NUM_LAYERS = 256, 4, 2
LENGTHS = (512, 1024, 2048, 4096, 8192)
NUM_LOSSES = 3
DENSE = "pytorch_transformer"

# Relative, of losses. Attention is a small part of them: without a mask they differ by some 1e-4.
TOLERANCE = 1e-7

LAYOUTS: Dict[str, Dict[str, Any]] = {
    "sliding_window": {"mode": "sliding_window", "block": 64, "window": 64, "num_global_tokens": 1},
    "bigbird": {"mode": "bigbird", "block": 64, "max_length": max(LENGTHS)},
    "fixed": {"mode": "fixed", "block": 64},
}


@SparseAttention.register("dense_with_mask_of")
class DenseWithMask(SparseAttention):
    """Dense attention with the mask of a layout, for its losses."""

    def __init__(self, section: Dict[str, Any]) -> None:
        self._layout = BlockSparseAttention.from_section(section).layout

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor,
        layer: int = 0,
        scale: Optional[float] = None,
    ) -> torch.Tensor:
        position = torch.arange(query.size(2))
        block = position // self._layout.block
        blocks = self._layout.blocks(int(block[-1]) + 1, NUM_HEADS, layer)
        mask = blocks[:, block[:, None], block]
        tokens = self._layout.tokens(position[:, None], position)
        if tokens is not None:
            mask = mask & tokens
        mask = mask & key_mask[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


class Training:
    """
    # Parameters

    length : `int`
    attention : `Dict[str, Any]`
        `None` for AllenNLP's own encoder.
    """

    def __init__(self, length: int, attention: Optional[Dict[str, Any]]) -> None:
        torch.manual_seed(1)
        parameters: Dict[str, Any] = {
            "type": DENSE if attention is None else "block_sparse_transformer",
            "input_dim": WIDTH,
            "num_layers": NUM_LAYERS,
            "feedforward_hidden_dim": 4 * WIDTH,
            "num_attention_heads": NUM_HEADS,
            "dropout_prob": 0.0,
        }
        if attention is not None:
            parameters["attention"] = dict(attention)
        self._encoder = Seq2SeqEncoder.from_params(Params(parameters))
        self._optimizer = torch.optim.SGD(self._encoder.parameters(), lr=0.1)
        self._inputs, self._targets = torch.randn(2, 1, length, WIDTH)
        self._mask = torch.ones(1, length, dtype=torch.bool)

    def step(self) -> float:
        """Returns the loss."""
        self._optimizer.zero_grad()
        # In fp32 differences would hide in the rounding of the mean.
        outputs = self._encoder(self._inputs, self._mask).double()
        loss = F.mse_loss(outputs, self._targets.double())
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def seconds(self) -> float:
        """Of a step."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in tokens")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--pairs", type=int, default=5, help="of steps, for each ratio")


def run(settings: argparse.Namespace) -> None:
    rows = []
    for length in settings.lengths:
        dense_bytes = measure(partial(_peak_memory, length, None))
        for name in settings.layouts:
            section = {"type": "block_sparse", **LAYOUTS[name]}
            row: Dict[str, Any] = {"length": length, "layout": name, "dense_bytes": dense_bytes}
            row["loss_difference"] = measure(partial(_loss_difference, length, name))
            row["seconds_of_pairs"] = measure(partial(_pairs, length, section, settings.pairs))
            row["bytes"] = measure(partial(_peak_memory, length, section))
            layout = BlockSparseAttention.from_section(section).layout
            blocks = layout.blocks(-(-length // layout.block), NUM_HEADS)
            row["share_of_blocks"] = blocks.float().mean().item()
            rows.append(row)
    data = {**report.heading(1), "rows": rows}
    report.write(settings.output, "sparse_attention", data, text(data))
    plot(settings.output / "sparse_attention.png", rows)
    report.show(text(data))


def measure(what: Callable[[], Any]) -> Any:
    """In a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.apply_async(what).get(timeout=1800)


def _loss_difference(length: int, name: str) -> float:
    """
    # Raises

    `RuntimeError`
        If the losses aren't the same.
    """
    section = LAYOUTS[name]
    expected, actual = (
        Training(length, attention)
        for attention in (
            {"type": "dense_with_mask_of", "section": section},
            {"type": "block_sparse", **section},
        )
    )
    difference = losses.largest_difference(
        f"{name} at {length}",
        [[actual.step() for _ in range(NUM_LOSSES)]],
        [[expected.step() for _ in range(NUM_LOSSES)]],
        "dense attention with its mask",
    )
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"The losses of '{name}' at {length} differ by {difference:.1e} from those of dense "
            f"attention with its mask, more than {TOLERANCE:.0e}."
        )
    return difference


def _pairs(length: int, section: Dict[str, Any], number: int) -> List[Tuple[float, float]]:
    """The seconds of a step, sparse and dense."""
    sparse, dense = Training(length, section), Training(length, None)
    sparse.step()
    dense.step()
    pairs = []
    for i in range(number):
        if i % 2 == 0:
            pairs.append((sparse.seconds(), dense.seconds()))
        else:
            seconds = dense.seconds()
            pairs.append((sparse.seconds(), seconds))
    return pairs


def _peak_memory(length: int, section: Optional[Dict[str, Any]]) -> int:
    """In bytes, of two steps, above what there is before the model is constructed."""
    Training(64, section).step()
    memory = PeakMemory(torch.device("cpu"))
    training = Training(length, section)
    memory.start()
    training.step()
    training.step()
    memory.stop()
    return memory.bytes


def _ratios(row: Dict[str, Any]) -> List[float]:
    return [sparse / dense for sparse, dense in row["seconds_of_pairs"]]


def text(data: Dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        ratios = _ratios(row)
        sparse, dense = (statistics.median(s) for s in zip(*row["seconds_of_pairs"]))
        rows.append(
            [
                str(row["length"]),
                f"`{row['layout']}`",
                f"{row['share_of_blocks']:.0%}",
                f"{statistics.median(ratios):.2f}",
                report.spread(report.quartiles(ratios)),
                f"{sparse:.2f}",
                f"{dense:.2f}",
                f"{row['bytes'] / row['dense_bytes']:.2f}",
                report.megabytes(row["bytes"]),
                report.megabytes(row["dense_bytes"]),
                f"{row['loss_difference']:.0e}",
            ]
        )
    headings = (
        "tokens",
        "layout",
        "of all blocks",
        "time to dense",
        "quartiles",
        "seconds",
        "dense",
        "memory to dense",
        "MB",
        "dense",
        "losses differ by",
    )
    return report.document(
        "Block-sparse attention",
        f"`python -m benchmarks sparse_attention`: a step of an encoder of {NUM_LAYERS} layers of "
        f"width {WIDTH} with {NUM_HEADS} heads, on one sequence, in fp32 on one thread; dense is "
        f"`{DENSE}`, which attends to all by PyTorch's fused kernel.\n"
        f"{report.describe(data, with_workers=False)}",
        report.table(headings, rows),
        "![Time and memory to dense attention, against the length](sparse_attention.png)",
    )


def plot(path: Path, rows: List[Dict[str, Any]]) -> None:
    with figure(path, (9, 3.6), columns=2) as axes:
        for axis, title in zip(axes[0], ("Time of a step", "Peak memory")):
            axis.set_title(f"{title}, to dense attention's")
            axis.set_xlabel("tokens")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.axhline(1, color="gray", linewidth=0.8)
            axis.tick_params(labelleft=True)
        for name in dict.fromkeys(row["layout"] for row in rows):
            of_layout = [row for row in rows if row["layout"] == name]
            lengths = [row["length"] for row in of_layout]
            times = [statistics.median(_ratios(row)) for row in of_layout]
            memory = [row["bytes"] / row["dense_bytes"] for row in of_layout]
            for axis, values in zip(axes[0], (times, memory)):
                axis.plot(lengths, values, marker="o", label=name)
