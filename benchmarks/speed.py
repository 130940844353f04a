"""
How fast training is against a bare DeepSpeed loop and against other trainers, what memory it takes,
and what crosses the network.

`python -m benchmarks.speed` trains the same models on the same batches with each contender, in a
process tree of its own. In each pair the bare loop and a contender make some steps, one after the
other, in alternating order, while all others wait. The losses of all micro-batches have to be the
same for all of them before anything is reported. Prints a table, and writes it with all figures and
a plot to `benchmarks/results`, after each combination of model, ZeRO stage and accumulation.
`benchmarks/NOTES.md` says how the figures are made and what they mean.
"""

import argparse
import logging
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from benchmarks import report, workload
from benchmarks.contenders import BARE, CONTENDERS, Job, Unavailable
from benchmarks.figures import RESULTS
from benchmarks.losses import largest_difference
from benchmarks.process_tree import ProcessTree, Worker, time_pair
from benchmarks.stopwatch import Plan
from benchmarks.workload import TASKS, Cell

# A variant of ours that only answers one question, which NOTES.md tells of, is left out.
DEFAULT_CONTENDERS = [name for name in CONTENDERS if name != "ours-flush"]
MIN_WARMUP_STEPS = 3
TIME_LIMIT = 600.0  # seconds, for all contenders of one cell


class Settings(argparse.Namespace):
    """What the command line says."""

    models: List[str]
    stages: List[int]
    accumulation: List[int]
    contenders: List[str]
    pairs: int
    steps: Optional[int]
    output: Path
    keep: bool


def main(arguments: Optional[List[str]] = None) -> None:
    settings = _parse(arguments)
    # AllenNLP's loggers tell of each object that is constructed.
    logging.getLogger().setLevel(logging.ERROR)
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    results = report.Report(settings.output, world_size, keep=settings.keep)
    for model in settings.models:
        with tempfile.TemporaryDirectory() as directory:
            data = Path(directory)
            workload.prepare(model, world_size, data)
            for accumulation in settings.accumulation:
                for stage in settings.stages:
                    cell = Cell(model, stage, accumulation)
                    results.add(measure(cell, settings, world_size, data))
    results.print()


def measure(cell: Cell, settings: Settings, world_size: int, data: Path) -> List[Dict[str, Any]]:
    """
    One row for each contender that takes part.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    steps = settings.steps or max(1, TASKS[cell.model].steps // cell.accumulation)
    # As long as a segment, for what a loop finds out in its first second.
    plan = Plan(max(MIN_WARMUP_STEPS, steps), settings.pairs, steps)
    skipped: Dict[str, str] = {}
    trees: Dict[str, ProcessTree] = {}
    with ExitStack() as stack:

        def start(name: str, plan: Plan) -> ProcessTree:
            task = partial(train, name, cell, data)
            tree = ProcessTree(f"{name} ({cell})", task, plan, world_size, TIME_LIMIT)
            return stack.enter_context(tree)

        for name in settings.contenders:
            contender = CONTENDERS[name]
            if name == BARE or not contender.takes_part(cell):
                continue
            reason = contender.why_not_here()
            if reason is None:
                contender.preload()
                trees[name] = start(name, plan)
            else:
                skipped[name] = reason
        for name, tree in list(trees.items()):
            try:
                tree.wait_until_warm()
            except Unavailable as reason:
                skipped[name] = str(reason)
                del trees[name]
        bare = start(BARE, plan._replace(num_segments=settings.pairs * max(1, len(trees))))
        bare.wait_until_warm()

        seconds: Dict[str, List[Tuple[float, float]]] = {name: [] for name in trees}
        for pair in range(settings.pairs):
            for name, tree in trees.items():
                seconds[name].append(time_pair(bare, tree, one_first=pair % 2 == 0))
        if not trees:
            seconds = {BARE: [(s, s) for s in (bare.time_segment() for _ in range(settings.pairs))]}
        outcomes = {name: tree.finish() for name, tree in {BARE: bare, **trees}.items()}

    # The bare loop makes more steps than the others.
    losses = {name: [rank.losses for rank in ranks] for name, ranks in outcomes.items()}
    differences = {
        name: largest_difference(
            f"{name} ({cell})", losses[name], losses[BARE], BARE, cell.accumulation
        )
        for name in outcomes
    }
    pairs_of_bare = [(first, first) for pairs in seconds.values() for first, _ in pairs]
    return [
        report.row(
            cell,
            name,
            plan,
            world_size,
            outcomes[name],
            pairs_of_bare if name == BARE else seconds[name],
            differences[name],
        )
        for name in outcomes
    ] + [report.skipped_row(cell, name, reason) for name, reason in skipped.items()]


def train(contender: str, cell: Cell, data: Path, worker: Worker) -> None:
    """What each worker of a contender does."""
    data_loader = workload.build_data_loader(
        cell.model, data, worker.plan.total * cell.accumulation
    )
    data_loader.set_target_device(worker.device)
    stopwatch = worker.start_stopwatch(cell.accumulation)
    CONTENDERS[contender].train(
        Job(
            cell=cell,
            model=workload.build_model(cell.model, data),
            data_loader=data_loader,
            stopwatch=stopwatch,
            device=worker.device,
            rank=worker.rank,
            world_size=worker.world_size,
            directory=worker.directory,
        )
    )


def _parse(arguments: Optional[List[str]]) -> Settings:
    models = [
        name for name, task in TASKS.items() if torch.cuda.is_available() or not task.needs_gpu
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=TASKS, default=models)
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=DEFAULT_CONTENDERS,
        help="the bare loop takes part in any case",
    )
    parser.add_argument("--pairs", type=int, default=8, help="timed segments of each contender")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps in a segment, instead of about a second's worth"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="a directory")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the other results that are in the output, of the same machine and versions",
    )
    return parser.parse_args(arguments, namespace=Settings())


if __name__ == "__main__":
    main()
