"""
What gradient caching costs, and against others that do the same.

`python -m benchmarks.contrastive` trains the same transformer on the same pairs of texts with each
contender, in a process tree of its own, with batches that would fit into memory in one piece. Two
contenders make some steps, one after the other, in alternating order, while all others wait. The
losses of all steps have to be the same for all of them before anything is reported. Prints a table,
and writes it with all figures to `benchmarks/results`, after each ZeRO stage. `benchmarks/NOTES.md`
says how the figures are made and what they mean.
"""

import argparse
import logging
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from benchmarks import contrastive_report, contrastive_workload
from benchmarks.contrastive_contenders import CONTENDERS, PAIRS
from benchmarks.contrastive_workload import Batches, Cell, ContrastiveJob
from benchmarks.figures import RESULTS
from benchmarks.losses import largest_difference
from benchmarks.process_tree import ProcessTree, Worker, time_pair
from benchmarks.stopwatch import Plan

WARMUP_STEPS = 2
COUNTED_STEPS = 1
TIME_LIMIT = 900.0  # seconds, for all contenders of one stage


class Settings(argparse.Namespace):
    """What the command line says."""

    stages: List[int]
    batch: int
    chunk: int
    tokens: int
    pairs: int
    steps: int
    output: Path


class Reference:
    """What all contenders' losses are compared with: those of the first that has come."""

    def __init__(self) -> None:
        self._name: Optional[str] = None
        self._losses: List[float] = []

    def compare(self, name: str, losses: List[float]) -> float:
        """As `largest_difference`."""
        if self._name is None:
            self._name, self._losses = name, losses
        return largest_difference(name, [losses], [self._losses], self._name)


def main(arguments: Optional[List[str]] = None) -> None:
    settings = _parse(arguments)
    # AllenNLP's loggers tell of each object that is constructed.
    logging.getLogger().setLevel(logging.ERROR)
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    results = contrastive_report.Report(
        settings.output,
        world_size,
        batch_size=settings.batch,
        chunk_size=settings.chunk,
        num_tokens=settings.tokens,
    )
    reference = Reference()
    for stage in settings.stages:
        cell = Cell(stage, settings.batch, settings.chunk, settings.tokens)
        with tempfile.TemporaryDirectory() as directory:
            contrastive_workload.prepare(cell, Path(directory))
            measure(cell, settings, world_size, Path(directory), results, reference)
    results.print()


def measure(
    cell: Cell,
    settings: Settings,
    world_size: int,
    encoder: Path,
    results: contrastive_report.Report,
    reference: Reference,
) -> None:
    """
    Adds a stage to the results.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    taking_part = {name: c for name, c in CONTENDERS.items() if cell.stage in c.stages}
    reasons = {name: contender.why_not_here() for name, contender in taking_part.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    names = [name for name in taking_part if name not in skipped]
    pairs = [pair for pair in PAIRS if set(pair) <= set(names)]
    with ExitStack() as stack:
        trees: Dict[str, ProcessTree] = {}
        for name in names:
            taking_part[name].preload()
            num_segments = settings.pairs * sum(name in pair for pair in pairs)
            trees[name] = stack.enter_context(
                ProcessTree(
                    f"{name} (stage {cell.stage})",
                    partial(train, name, cell, encoder),
                    Plan(WARMUP_STEPS, num_segments, settings.steps, COUNTED_STEPS),
                    world_size,
                    TIME_LIMIT,
                )
            )
        for tree in trees.values():
            tree.wait_until_warm()
        seconds: Dict[Any, List[Any]] = {pair: [] for pair in pairs}
        for i in range(settings.pairs):
            for one, other in pairs:
                seconds[one, other].append(
                    time_pair(trees[one], trees[other], one_first=i % 2 == 0)
                )
        outcomes = {name: tree.finish() for name, tree in trees.items()}

    differences = {
        # sentence-transformers has each rank's own part of the loss, all others the whole.
        name: reference.compare(
            f"{name} (stage {cell.stage})",
            [sum(losses) / world_size for losses in zip(*(rank.losses for rank in ranks))],
        )
        for name, ranks in outcomes.items()
    }
    results.add(cell.stage, settings.steps, outcomes, differences, seconds, skipped)


def train(contender: str, cell: Cell, encoder: Path, worker: Worker) -> None:
    """What each worker of a contender does."""
    batches = Batches(cell, worker)
    CONTENDERS[contender].train(
        ContrastiveJob(cell, encoder, batches, worker.start_stopwatch(), worker)
    )


def _parse(arguments: Optional[List[str]]) -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 2, 3])
    parser.add_argument("--batch", type=int, default=128, help="pairs of texts on a worker")
    parser.add_argument("--chunk", type=int, default=32, help="of these, encoded at a time")
    parser.add_argument("--tokens", type=int, default=32, help="in each text")
    parser.add_argument("--pairs", type=int, default=6, help="timed segments against each other")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a segment")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a directory")
    return parser.parse_args(arguments, namespace=Settings())


if __name__ == "__main__":
    main()
