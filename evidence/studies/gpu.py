"""
The tests and measurements that need a GPU, in blocks that need no network.

- `tests`: the tests that are marked for GPUs.
- `parity`: the deepspeed trainer at each stage compared with `gradient_descent`.
- `real`: the models of the study "real".
- `decoder`: a decoder of 350 million parameters in bf16, compared with bare DeepSpeed, Accelerate,
  `fully_shard` and Lightning.
- `optimizers`: fused Adam and AdamW compared with those of PyTorch.
- `compile`: `torch_compile`.
- `offload`: memory and time with the optimizer and the parameters offloaded.
- `profile`: the share of a step in which the host waits for the device, which is to be less than
  2 %.

Writes one line per figure to `evidence/results/gpu-<card>.md`, and its data to
`gpu-<card>.json` in `raw`, which git tracks for GPUs, as soon as it is known. Lines of other blocks
stay there. At the end it prints one table, to be pasted into an issue. `--tiny` makes all models
tiny, to try the blocks on a CPU.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple

import torch

from allennlp_deepspeed.engine.lifecycle.profiler_ranges import DEVICE_SYNC, PREFIX
from evidence import REPOSITORY, report
from evidence.contenders import DECODER_CONTENDERS
from evidence.contenders.ours import Ours, OursWith
from evidence.contenders.random_texts import RandomTexts
from evidence.harness import training
from evidence.harness.contender import Contender
from evidence.harness.losses import largest_difference
from evidence.harness.pairing import Comparison, compare
from evidence.harness.stopwatch import Plan
from evidence.studies import real

TIME = "less than 10 minutes a block"

TIME_LIMIT = 540.0  # seconds, of a block
STEPS = 20  # of a training that isn't timed
PROFILED_STEPS = range(5, 60)  # with at least one in which losses are read, once a second
FAILED = "failed"  # the figure of a test

DECODER = {"vocab_size": 32000, "num_tokens": 512, "width": 1024, "num_layers": 24, "num_heads": 16}
TINY_DECODER = {"vocab_size": 50, "num_tokens": 8, "width": 16, "num_layers": 2, "num_heads": 2}

# Roundings of half precision, relative to a loss.
BF16_TOLERANCE = 2e-2
# In fp32, where a GPU adds up gradients of embeddings in no fixed order.
PARITY_TOLERANCE = 1e-4


class Line(NamedTuple):
    """
    # Parameters

    what : `str`
    figure : `str`
    detail : `str`, optional (default = `""`)
    """

    what: str
    figure: str
    detail: str = ""


class Setting(NamedTuple):
    """
    # Parameters

    tiny : `bool`
    directory : `Path`
        For what a block writes.
    deadline : `float`
        On the clock of `time.monotonic`.
    """

    tiny: bool
    directory: Path
    deadline: float

    @property
    def seconds_left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    @property
    def world_size(self) -> int:
        return max(1, torch.cuda.device_count())

    def decoder(self, stage: int, accumulation: int = 1) -> RandomTexts:
        size = TINY_DECODER if self.tiny else DECODER
        batch_size = 2 if self.tiny else 8
        bf16 = not self.tiny
        return RandomTexts(self.directory, stage, accumulation, batch_size, size, bf16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--tiny", action="store_true")


def run(settings: argparse.Namespace) -> bool:
    if not (torch.cuda.is_available() or settings.tiny):
        sys.exit("There is no GPU here. `--tiny` tries the blocks on the CPU.")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    settings.page.name = "gpu-" + re.sub(r"\W+", "-", card.lower())
    data = settings.page.read()
    data.update(report.heading(max(1, torch.cuda.device_count()), "transformers", "accelerate"))
    for block in settings.blocks:
        lines: List[Line] = []
        found = {"made": report.made(data), "lines": lines}
        data.setdefault("blocks", {})[block] = found
        with tempfile.TemporaryDirectory(prefix=f"{block}-") as directory:
            deadline = time.monotonic() + TIME_LIMIT
            setting = Setting(settings.tiny, Path(directory), deadline)
            for line in _timed(block, BLOCKS[block](setting)):
                lines.append(line)
                settings.page.write(data, text(card, data))
    settings.page.text = ""  # the summary instead
    print(summary(card, data, settings.blocks))
    blocks = [data["blocks"][block] for block in settings.blocks]
    return not any(line[1] == FAILED for block in blocks for line in block["lines"])


def _timed(block: str, lines: Iterable[Line]) -> Iterator[Line]:
    start = time.monotonic()
    try:
        yield from lines
    except (Exception, SystemExit) as error:
        yield _failed(block, error)
    yield Line("seconds of this block", f"{time.monotonic() - start:.0f}")


def text(card: str, data: Dict[str, Any]) -> str:
    blocks: List[str] = []
    for name, block in data["blocks"].items():
        table = report.table(("what", "figure", "detail"), block["lines"])
        blocks += [f"## {name}", f"{block['made'].capitalize()}.", table]
    about = f"{report.describe(data)}\n`python -m evidence gpu` runs it again."
    notes = [data["note"]] if "note" in data else []
    return report.document(f"On a GPU: {card}", about, *notes, *blocks)


def summary(card: str, data: Dict[str, Any], blocks: Iterable[str]) -> str:
    """Returns one table of these blocks in Markdown, to be pasted into an issue."""
    rows = [(name, *line) for name in blocks for line in data["blocks"][name]["lines"]]
    table = report.table(("block", "what", "figure", "detail"), rows)
    return f"\n{card}: {report.describe(data)}\n\n{table}\n"


# Of a line of pytest, with workers and without.
_OUTCOME = re.compile(
    r"(?P<outcome>PASSED|FAILED|ERROR|SKIPPED) (?P<test>tests/.+?)\s*$"
    r"|^(?P<alone>tests/.+?) (?P<its>PASSED|FAILED|ERROR|SKIPPED)\b"
)


def tests(setting: Setting) -> Iterator[Line]:
    """Runs the marked tests. On a CPU they are collected and skipped."""
    arguments = ["tests", "-m", "gpu", "-v", "-rN", "--no-header"]
    if not setting.tiny:
        arguments += ["-n", str(min(10, os.cpu_count() or 1))]
    summary = ""
    outcomes: Dict[str, Counter[str]] = defaultdict(Counter)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as pytest:
        assert pytest.stdout is not None
        # Named at once: a machine that is lent may be taken back before the summary.
        for line in pytest.stdout:
            print(line, end="", flush=True)
            summary = line.strip("= \n") or summary
            if found := _OUTCOME.search(line):
                test = found["test"] or found["alone"]
                outcome = (found["outcome"] or found["its"]).lower()
                outcomes[test.partition("[")[0]][outcome] += 1
                if outcome in ("failed", "error"):
                    yield Line(test, FAILED)
    for function, counts in sorted(outcomes.items()):
        yield Line(function, ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    what = "`pytest -m gpu`"
    yield Line(what, FAILED, summary) if pytest.returncode else Line(what, summary)


def parity(setting: Setting) -> Iterator[Line]:
    expected = None
    stages = (3,) if setting.tiny else (0, 1, 2, 3)
    for name, trainer in [
        ("gradient_descent", {}),
        *((f"stage {stage}", _at_stage(stage)) for stage in stages),
    ]:
        out = _train(setting, name.replace(" ", "_"), trainer)
        loss = json.loads((out / "metrics.json").read_text())["training_loss"]
        if expected is None:
            expected = loss
            continue
        what = f"loss of {name}, difference from `gradient_descent`"
        difference = abs(loss - expected)
        is_same = difference <= PARITY_TOLERANCE * abs(expected)
        yield Line(what, f"{difference:.1e}" if is_same else FAILED, f"{loss} and {expected}")


def profile(setting: Setting) -> Iterator[Line]:
    profiler = {"type": "profiler", "steps": list(PROFILED_STEPS)}
    for stage in (3,) if setting.tiny else (0, 2, 3):
        trainer = {**_at_stage(stage), "callbacks": [profiler]}
        out = _train(setting, f"stage_{stage}", trainer, PROFILED_STEPS.stop)
        (trace,) = (out / "profile").glob("*_rank_0.json.gz")
        with gzip.open(trace, "rt") as file:
            events = json.load(file)["traceEvents"]
        # On a GPU each phase is there a second time, as the device sees it.
        phases = [
            event
            for event in events
            if event.get("name", "").startswith(PREFIX) and event.get("cat") == "user_annotation"
        ]
        start = min(event["ts"] for event in phases)
        end = max(event["ts"] + event["dur"] for event in phases)
        # Whoever makes the host wait, DeepSpeed and the model included.
        waits = [
            event
            for event in events
            if event.get("cat") == "cuda_runtime"
            and "Synchronize" in event["name"]
            # The profiler waits, too, when it stops.
            and start <= event["ts"] < end
        ]
        agreement = [event for event in phases if event["name"] == PREFIX + DEVICE_SYNC]
        yield Line(
            f"host waits of the steps' time, stage {stage}",
            f"{sum(event['dur'] for event in waits) / (end - start):.1%}",
            f"less than 2 % is the aim; losses are read {len(agreement)} × in "
            f"{len(PROFILED_STEPS)} steps: {sum(e['dur'] for e in agreement) / (end - start):.1%}",
        )


def _at_stage(stage: int) -> Dict[str, Any]:
    return {"type": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": stage}}}


def _train(setting: Setting, name: str, trainer: Dict[str, Any], num_steps: int = STEPS) -> Path:
    """Trains a classifier of texts, without dropout, by the command. Returns its directory."""
    width, num_layers = (64, 1) if setting.tiny else (1024, 12)
    words = [f"word{i}" for i in range(16)]
    texts = [(" ".join(words[i % 8 :]), str(i % 3)) for i in range(8 * num_steps)]
    transformer = training.transformer(width, num_layers, dropout_prob=0.0)
    config = training.config(setting.directory, texts, 8, 1, trainer, **transformer)
    config["trainer"]["cuda_device"] = 0 if torch.cuda.is_available() else -1
    out = setting.directory / name
    training.train(config, out)
    return out


def real_models(setting: Setting) -> Iterator[Line]:
    arguments = argparse.Namespace(rounds=2 if setting.tiny else 5, tiny=setting.tiny)
    for model in ("lora",) if setting.tiny else real.SUBJECTS:
        accumulation = max(real.SUBJECTS[model].accumulation)
        arguments.time_limit = setting.seconds_left
        try:
            directory = tempfile.mkdtemp(dir=setting.directory)
            rows = real.measure(model, 2, accumulation, arguments, setting.world_size, directory)
        except ImportError as error:
            yield Line(model, "not run", str(error))
        except (Exception, SystemExit) as error:
            yield _failed(model, error)
        else:
            yield from map(_line_of_real_model, rows)


def decoder(setting: Setting) -> Iterator[Line]:
    for stage in (3,) if setting.tiny else (0, 3):
        names = list(DECODER_CONTENDERS)[: 4 if setting.tiny else None]
        contenders = {name: DECODER_CONTENDERS[name] for name in names}
        workload = setting.decoder(stage, accumulation=2)
        yield from _beside(setting, workload, "ours", contenders, of_reference=True)


def _line_of_real_model(row: Dict[str, Any]) -> Line:
    what = f"{row['model']}, stage {row['zero_stage']}, accumulation {row['accumulation']}"
    if "skipped" in row:
        return Line(f"{what}: {row['tool']}", "not run", row["skipped"])
    memory = f"{row['peak_memory'] / 1e6:.0f} MB"
    if row["tool"] == real.OURS:
        return Line(f"{what}: {row['unit']} a second", f"{row['per_second']:.0f}", memory)
    quartiles = report.spread(report.quartiles(row["ratios"]))
    ratio = f"{statistics.median(row['ratios']):.2f}×"
    return Line(
        f"{what}: speed of ours to {row['tool']}", ratio, f"{quartiles}; {row['tool']} has {memory}"
    )


def optimizers(setting: Setting) -> Iterator[Line]:
    for name in ("adamw",) if setting.tiny else ("adam", "adamw"):
        contenders = {
            optimizer: OursWith({"optimizer": {"type": optimizer, "lr": 1e-5}})
            for optimizer in (name, f"fused_{name}")
        }
        yield from _beside(setting, setting.decoder(stage=2), name, contenders)


def compiled(setting: Setting) -> Iterator[Line]:
    leaves = {"leaf_module": {"classes": ["TransformerEncoderLayer"]}}
    # The backend that compiles nothing takes less time.
    compiler: Any = {"backend": "aot_eager"} if setting.tiny else True
    cases: Dict[int, Dict[str, Any]] = {3: leaves} if setting.tiny else {0: {}, 3: leaves}
    for stage, zero in cases.items():
        contenders = {
            "ours": Ours(),
            "compiled": OursWith({"zero": zero}, {"torch_compile": compiler}),
        }
        yield from _beside(setting, setting.decoder(stage), "ours", contenders)


def offload(setting: Setting) -> Iterator[Line]:
    optimizer = {"offload_optimizer": {"device": "cpu"}}
    parameters = {**optimizer, "offload_param": {"device": "cpu"}}
    contenders = {
        "ours": Ours(),
        "optimizer offloaded": OursWith({"zero": optimizer}),
        "parameters offloaded": OursWith({"zero": parameters}),
    }
    yield from _beside(setting, setting.decoder(stage=3), "ours", contenders)


def _beside(
    setting: Setting,
    workload: RandomTexts,
    reference: str,
    contenders: Dict[str, Contender],
    of_reference: bool = False,
) -> List[Line]:
    """
    Compares losses, and then the speed of each contender with that of the reference, or of the
    reference with that of each contender. A contender whose losses differ, or a comparison that
    ends with an error, is reported as failed.
    """
    contenders = {name: c for name, c in contenders.items() if c.supports(workload)}
    pairs = [(reference, name) for name in contenders if name != reference]
    plan = Plan(3, 2, 1) if setting.tiny else Plan(5, 6, 5)
    try:
        found = compare(contenders, pairs, workload, plan, setting.world_size, setting.seconds_left)
    except Exception as error:
        return [_failed(str(workload), error)]
    return _compared(workload, reference, found, plan, of_reference)


def _failed(what: str, error: BaseException) -> Line:
    """Reports a case that failed, so that the next ones are still measured."""
    traceback.print_exception(error)
    # A command that failed ends this process with what it printed last.
    lines = str(error).strip().split("\n")
    reason = lines[-1] if isinstance(error, SystemExit) else lines[0]
    return Line(what, FAILED, reason.replace("|", "\\|"))


def _compared(
    workload: RandomTexts, reference: str, found: Comparison, plan: Plan, of_reference: bool
) -> List[Line]:
    lines = [Line(f"{workload}: {name}", "not run", why) for name, why in found.skipped.items()]
    for name, ranks in found.outcomes.items():
        memory = f"{max(rank.peak_memory for rank in ranks) / 1e6:.0f} MB"
        if name == reference:
            own = statistics.median(
                one.seconds for pair in found.timings.values() for one, _ in pair
            )
            figure = f"{1000 * own / plan.steps:.1f} ms"
            lines.insert(0, Line(f"{workload}: a step of {name}", figure, memory))
            continue
        try:
            difference = largest_difference(
                f"{name} ({workload})",
                [rank.losses for rank in ranks],
                [rank.losses for rank in found.outcomes[reference]],
                reference,
                workload.accumulation,
                BF16_TOLERANCE if workload.bf16 else 1e-4,
            )
        except RuntimeError as error:
            lines.append(_failed(f"{workload}: {name}", error))
            continue
        ratios = [own.seconds / other.seconds for own, other in found.timings[reference, name]]
        one, other = name, reference
        if of_reference:
            ratios, one, other = [1 / ratio for ratio in ratios], reference, name
        quartiles = report.spread(report.quartiles(ratios))
        detail = f"{quartiles}; {name} has {memory}; losses differ by {difference:.0e}"
        figure = f"{statistics.median(ratios):.2f}×"
        lines.append(Line(f"{workload}: speed of {one} to {other}", figure, detail))
    return lines


BLOCKS: Dict[str, Callable[[Setting], Iterator[Line]]] = {
    "tests": tests,
    "parity": parity,
    "real": real_models,
    "decoder": decoder,
    "optimizers": optimizers,
    "compile": compiled,
    "offload": offload,
    "profile": profile,
}
