"""
Trains cases with the "deepspeed" trainer: many in one pair of workers, because bringing up workers
takes longer than a case.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.models import Model
from allennlp.nn.parallel import TorchDdpAccelerator
from allennlp.training import Trainer

from tests.cross.case import BATCH_SIZE, Case
from tests.cross.data import batches_of, validation_batches_of
from tests.cross.model import Interruption, to_instance
from tests.support import fp16_on_cpu  # noqa: F401  # where pytest has not imported it
from tests.support.command import allennlp
from tests.support.experiment import Result
from tests.support.workers import run_workers, start_fork

TIME_LIMIT = 60  # seconds, for a case


class Finished(NamedTuple):
    """
    What has become of a case with the "deepspeed" trainer.

    # Parameters

    weights : `Dict[str, torch.Tensor]`
        The state dict; `None` if there is none.
    losses : `List[List[float]]`
        Of each step, on each rank.
    norms : `List[float]`
        Of each step, if they have been reported.
    validation_losses : `List[float]`
        Of each epoch.
    refusal : `str`
        The message of a `ConfigurationError`; `None` if it was not refused.
    failure : `str`
        What else went wrong.
    """

    weights: Optional[Dict[str, torch.Tensor]] = None
    losses: List[List[float]] = []
    norms: List[float] = []
    validation_losses: List[float] = []
    refusal: Optional[str] = None
    failure: Optional[str] = None
    seconds: float = 0.0


def train_all(cases: List[Case], root: Path) -> Dict[int, Finished]:
    """
    Trains cases, each of which leaves its files in a folder with its number.

    A case that fails ends its workers. The cases after it get new ones.
    """
    finished: Dict[int, Finished] = {}
    for case in cases:
        if case.entry == "command":
            finished[case.index] = _train_with_command(case, root / str(case.index))
    for workers in (1, 2):
        waiting = [c for c in cases if c.workers == workers and c.index not in finished]
        while waiting:
            ended = _train_in_workers(waiting, workers, root)
            finished.update(ended)
            waiting = [case for case in waiting if case.index not in finished]
    return finished


def _train_in_workers(cases: List[Case], workers: int, root: Path) -> Dict[int, Finished]:
    """Those of the cases that the workers have come to."""

    def work(rank: int) -> None:
        for case in cases:
            directory = root / str(case.index)
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / f"output_{rank}.txt", "w") as output:
                for descriptor in (1, 2):
                    os.dup2(output.fileno(), descriptor)
            faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=sys.__stderr__)
            start = time.time()
            finished = _attempt(partial(train, case, rank, directory))
            finished = finished._replace(seconds=time.time() - start)
            torch.save(tuple(finished), directory / f"finished_{rank}.pt")
            if finished.failure is not None:
                os._exit(1)
        faulthandler.cancel_dump_traceback_later()

    with contextlib.suppress(AssertionError):  # of the exit codes
        _run(workers, work)
    ended = {}
    for case in cases:
        directory = root / str(case.index)
        paths = [directory / f"finished_{rank}.pt" for rank in range(workers)]
        by_rank = [
            Finished(*torch.load(path, weights_only=False)) for path in paths if path.exists()
        ]
        ended[case.index] = _of_all_ranks(case, directory, by_rank)
        if ended[case.index].failure is not None:
            break
    return ended


def _run(workers: int, work: Callable[[int], None]) -> None:
    if workers > 1:
        run_workers(workers, work)
        return

    # Without a process group, as in a user's process.
    def work_alone() -> None:
        start_fork()
        work(0)

    process = multiprocessing.get_context("fork").Process(target=work_alone)
    process.start()
    process.join()


def _attempt(function: Callable[[], Finished]) -> Finished:
    try:
        return function()
    except ConfigurationError as error:
        return Finished(refusal=str(error))
    except (Exception, SystemExit):  # whatever it is, it belongs to the case
        return Finished(failure=traceback.format_exc()[-3000:])


def _of_all_ranks(case: Case, directory: Path, by_rank: List[Finished]) -> Finished:
    failures = [finished.failure for finished in by_rank if finished.failure is not None]
    if failures:
        return by_rank[0]._replace(failure="\n".join(failures))
    if len(by_rank) < case.workers:
        output = "\n".join(
            path.read_text()[-2000:] for path in sorted(directory.glob("output_*.txt"))
        )
        return Finished(failure=f"A worker has ended, or hung:\n{output}")
    refusals = {finished.refusal for finished in by_rank}
    if len(refusals) > 1:
        return Finished(failure=f"Only some workers have refused it: {refusals}")
    return by_rank[0]


def train(case: Case, rank: int, directory: Path) -> Finished:
    """To be called by every worker, with the number of workers that the case has."""
    serialization_dir = directory / "out"
    try:
        trainer = _construct(case, rank, serialization_dir)
        trainer.train()
    except Interruption:
        # Recovery must not depend on what it finds in the process.
        torch.manual_seed(rank)
        if case.stage_after_interruption is not None:
            case = replace(case, stage=case.stage_after_interruption)
        trainer = _construct(case, rank, serialization_dir)
        trainer.train()
    if case.workers == 1:
        weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    else:
        weights = torch.load(serialization_dir / "best.th", weights_only=True)
    return _with_steps(case, serialization_dir, weights)


def _construct(case: Case, rank: int, serialization_dir: Path) -> Trainer:
    serialization_dir.mkdir(exist_ok=True)
    vocab = Vocabulary()
    arguments: Dict[str, Any] = {
        "model": Model.from_params(Params(deepcopy(case.model())), vocab=vocab),
        "serialization_dir": str(serialization_dir),
        "data_loader": _data_loader(batches_of(case, rank), vocab),
    }
    if case.validation:
        arguments["validation_data_loader"] = _data_loader(validation_batches_of(case, rank), vocab)
    if case.workers > 1:
        arguments.update(
            local_rank=rank,
            world_size=case.workers,
            distributed=True,
            cuda_device=torch.device("cpu"),
            ddp_accelerator=TorchDdpAccelerator(
                find_unused_parameters=case.find_unused_parameters,
                local_rank=rank,
                world_size=case.workers,
                cuda_device=torch.device("cpu"),
            ),
        )
    return Trainer.from_params(Params(deepcopy(case.trainer())), **arguments)


def _data_loader(batches: List[List[Any]], vocab: Vocabulary) -> SimpleDataLoader:
    instances = [to_instance(example) for batch in batches for example in batch]
    return SimpleDataLoader(instances, BATCH_SIZE, vocab=vocab)


def _with_steps(case: Case, serialization_dir: Path, weights: Dict[str, torch.Tensor]) -> Finished:
    by_rank = [
        _read_steps(serialization_dir / f"steps_{rank}.jsonl") for rank in range(case.workers)
    ]
    validation_losses = [
        json.loads((serialization_dir / f"metrics_epoch_{epoch}.json").read_text()).get(
            "validation_loss"
        )
        for epoch in range(case.num_epochs)
    ]
    return Finished(
        weights,
        [[step["loss"] for step in steps] for steps in by_rank],
        [step["norm"] for step in by_rank[0]],
        [loss for loss in validation_losses if loss is not None],
    )


def _read_steps(path: Path) -> List[Dict[str, Any]]:
    """Steps that have been taken again after recovery stand for the first time."""
    steps = {}
    for line in path.read_text().splitlines():
        step = json.loads(line)
        steps[step["epoch"], step["step"]] = step
    return [steps[key] for key in sorted(steps)]


def _train_with_command(case: Case, directory: Path) -> Finished:
    """With `allennlp train`, and the files that it reads and leaves."""
    start = time.time()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    ranks = range(case.workers)
    config: Dict[str, Any] = {
        "dataset_reader": {"type": "cross"},
        "vocabulary": {"type": "empty"},
        "model": case.model(),
        "train_data_path": _write(directory / "train.jsonl", [batches_of(case, r) for r in ranks]),
        "data_loader": {"batch_size": BATCH_SIZE, "shuffle": False},
        "trainer": case.trainer(),
    }
    if case.validation:
        config["validation_data_path"] = _write(
            directory / "validation.jsonl", [validation_batches_of(case, r) for r in ranks]
        )
    if case.workers > 1:
        config["distributed"] = {"cuda_devices": [-1] * case.workers}
        if case.find_unused_parameters:
            accelerator = {"type": "torch", "find_unused_parameters": True}
            config["distributed"]["ddp_accelerator"] = accelerator
    else:
        config["trainer"]["cuda_device"] = -1
    if case.stage == 3:
        config["type"] = "deepspeed"
    (directory / "config.json").write_text(json.dumps(config))
    arguments: List[Any] = ["train", directory / "config.json", "-s", directory / "out"]
    packages = ("allennlp_deepspeed", "tests.cross.model")
    run = allennlp(*arguments, include_packages=packages)
    if (directory / "out" / "interrupted").exists() and run.returncode != 0:
        run = allennlp(*arguments, "--recover", include_packages=packages)
    (directory / "output_0.txt").write_text(run.output)
    if run.returncode != 0:
        # A config that is refused ends the command with a message alone.
        if run.returncode == 1 and "Traceback" not in run.output:
            return Finished(refusal=run.output[-2000:])
        return Finished(failure=run.output[-3000:])
    result = Result(directory / "out")
    finished = _with_steps(case, result.serialization_dir, result.weights())
    return finished._replace(seconds=time.time() - start)


def _write(path: Path, by_rank: List[List[List[Any]]]) -> str:
    examples = [example for batches in by_rank for batch in batches for example in batch]
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)
