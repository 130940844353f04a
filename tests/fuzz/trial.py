"""
What becomes of a config: checked in a process forked from this one, and trained by the command if
that lets it pass.
"""

import json
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch.config_check import check
from tests.support.command import Run, allennlp
from tests.support.workers import start_fork

TRAINED = "trained"
REFUSED = "refused before data are read"
CONSTRUCTION = "refused when a section is constructed"
OTHERS = "ended by an error of the data, the model or a callback"
FAULT = "fault"

PACKAGES = ("allennlp_deepspeed", "tests.fixtures")

# Seconds. A training takes 3 of them.
_LIMIT_OF_CHECK, _LIMIT_OF_TRAINING = 20, 90

# Users see where their data, model or callback fails.
_FRAME_OF_OTHERS = (
    r"/(?:allennlp|transformers)/(?:data|models|training/callbacks)/.*, line \d+, in (?!__init__)"
)

_MAX_LINES = 25
_MAX_LENGTH = 700  # of a line


class Outcome(NamedTuple):
    """
    # Parameters

    name : `str`
        What has become of the config.
    text : `str`
        The message, or what of the output shows the fault.
    """

    name: str
    text: str


def checked(config: Dict[str, Any]) -> Optional[Outcome]:
    """What the check says of a config. `None` if it lets it pass."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(config, writer))
    process.start()
    writer.close()
    outcome: Optional[Outcome] = Outcome(FAULT, "the check hangs")
    if reader.poll(_LIMIT_OF_CHECK):
        try:
            outcome = reader.recv()
        except EOFError:
            outcome = Outcome(FAULT, "the process of the check has died")
    process.kill()
    process.join()
    return outcome


def _check(config: Dict[str, Any], writer: Any) -> None:
    start_fork()
    outcome: Optional[Outcome] = None
    try:
        check(Params(json.loads(json.dumps(config))))
    except ConfigurationError as error:
        outcome = _judged(error.message)
    except BaseException as error:
        outcome = Outcome(FAULT, f"the check fails: {type(error).__name__}: {error}")
    writer.send(outcome)
    writer.close()


def _judged(message: str) -> Outcome:
    lines = message.splitlines()
    is_short = 0 < len(lines) <= _MAX_LINES and all(len(line) <= _MAX_LENGTH for line in lines)
    names_key = re.search(r"['\"\w]", message) is not None
    if not is_short or not names_key or "Traceback" in message:
        return Outcome(FAULT, f"the message isn't short: {message}")
    return Outcome(REFUSED, message)


def trained(config: Dict[str, Any], directory: Path) -> Outcome:
    """What becomes of a config that the check lets pass."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    started = time.monotonic()
    run = allennlp(
        "train",
        directory / "config.json",
        "-s",
        directory / "out",
        include_packages=PACKAGES,
        time_limit=_LIMIT_OF_TRAINING,
    )
    return _of_run(run, directory / "out", time.monotonic() - started)


def _of_run(run: Run, out: Path, seconds: float) -> Outcome:
    if run.timed_out:
        if list(out.glob("metrics_epoch_*.json")):
            return Outcome(TRAINED, "for as many epochs as there was time")
        return Outcome(FAULT, f"no epoch within {seconds:.0f} s: {run.output[-1500:]}")
    if run.returncode == 0:
        return Outcome(TRAINED, "")
    output = "\n".join(line for line in run.output.splitlines() if not line.startswith("20"))
    if "Traceback" in run.output:
        # Numbers that aren't finite are what training has made of them.
        if re.search("(nan loss|NaN or infinite gradients) encountered", run.output):
            return Outcome(TRAINED, "until a number was not finite")
        log = re.search(r"\(Full traceback: (.*)\)", run.output)
        if log is not None and _is_raised_by_others(Path(log[1]).read_text()):
            return Outcome(OTHERS, output[-2500:])
        return Outcome(FAULT, output[-2500:])
    has_read = "loading instances" in run.output
    return Outcome(CONSTRUCTION if has_read else REFUSED, output[-1200:])


def _is_raised_by_others(traceback: str) -> bool:
    """Whether the data, the model or a callback have called what fails."""
    last = re.findall(r'File "(.*)", line', traceback)[-1]
    # At stage 3 a model's `Linear` is DeepSpeed's.
    is_ours = re.search(r"/(allennlp_deepspeed|deepspeed/(?!runtime/zero/linear))", last)
    return is_ours is None and re.search(_FRAME_OF_OTHERS, traceback) is not None
