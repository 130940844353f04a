"""
Which ZeRO stage to use, computed for 8, 64 and 512 GPUs and decoders of 1, 13 and 70 billion
parameters, from the memory that `allennlp deepspeed estimate` counts and the bytes that cross
links.

Measures nothing: it counts bytes, and divides them by the bandwidths below.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    ModelSize,
    model_states,
    optimizer_bytes,
)
from evidence import report

TIME = "a second"

_GB, _BF16 = 1e9, 2
GPUS_PER_NODE = 8
GPU_MEMORY, CPU_MEMORY = 80 * _GB, 2000 * _GB  # of a GPU, of a node
USABLE = 0.9  # of a GPU's memory: the rest is for CUDA, NCCL and fragmentation
COMPUTE = 400e12  # bf16 operations per second that a GPU reaches, of 989e12 (H100)
NVLINK = 300 * _GB  # bytes per second that a GPU reaches in collectives within its node
HOST_LINK = 40 * _GB  # bytes per second between a GPU and CPU memory (PCIe 5)
CPU_UPDATE = 200 * _GB  # bytes per second that a node's CPUs read and write in an update
NETWORKS = {"8 × 400 Gb/s": 320 * _GB, "100 Gb/s": 10 * _GB}  # reached by a node's links together
LATENCY = 10e-6  # seconds, of a hop of a ring
STEP_TOKENS, MICRO_BATCH_TOKENS = 4_194_304, 8_192  # of all workers, of one
WORLD_SIZES = (8, 64, 512)


class Decoder(NamedTuple):
    """Sizes of LLaMA's models. Keys and values have `kv` features."""

    layers: int
    hidden: int
    inner: int
    kv: int
    vocabulary: int = 32_000

    def size(self) -> ModelSize:
        h, projections = self.hidden, [self.hidden * self.hidden] * 2
        layer = [*projections, *[h * self.kv] * 2, *[h * self.inner] * 3, h, h]
        ends = [self.vocabulary * h, h, self.vocabulary * h]
        return ModelSize([*layer * self.layers, *ends], [], self.vocabulary * h)

    def activations(self) -> float:
        """
        Bytes with gradient checkpointing: a layer's inputs, what one layer computes (34 bytes for
        each token and feature, [Korthikanti et al.](https://arxiv.org/abs/2205.05198), section 4.1,
        with an attention that saves no scores), and logits of 1,024 tokens in bf16 and fp32.
        """
        tokens = MICRO_BATCH_TOKENS
        saved = tokens * self.hidden * (_BF16 * self.layers + 34)
        return saved + 1024 * self.vocabulary * (_BF16 + 2 * 4)


MODELS = {
    "1 billion": Decoder(22, 2048, 5632, 256),
    "13 billion": Decoder(40, 5120, 13824, 5120),
    "70 billion": Decoder(80, 8192, 28672, 1024),
}


@dataclass(frozen=True)
class Placement:
    """What the config says. `resharded` is `reshard_after_micro_batch`."""

    stage: int
    synchronization: str = "step"
    resharded: bool = True
    hpz: bool = False
    offload: bool = False

    def name(self) -> str:
        words = [str(self.stage)]
        words += ["hpZ of 8"] * self.hpz + ["optimizer on CPU"] * self.offload
        return ", ".join(words)

    def keys(self, accumulates: bool) -> str:
        if not accumulates:
            return "–"
        keys = [f'`"gradient_synchronization": "{self.synchronization}"`'] * (self.stage >= 2)
        if self.stage == 3:
            keys.append(f'`"reshard_after_micro_batch": {str(self.resharded).lower()}`')
        return ", ".join(keys) or "–"

    def resolve(self, world_size: int, accumulation: int, bucket: int) -> ResolvedConfig:
        zero: Dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": bucket}
        if self.hpz:
            zero["zero_hpz_partition_size"] = GPUS_PER_NODE
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {"bf16": {"enabled": True}, "zero_optimization": zero}
        settings = TrainerSettings(
            optimizer="adamw",
            world_size=world_size,
            workers_per_node=GPUS_PER_NODE,
            device_type="cuda",
            num_gradient_accumulation_steps=accumulation,
            gradient_synchronization=self.synchronization if self.stage >= 2 else "auto",
            reshard_after_micro_batch=self.resharded if self.stage == 3 else "auto",
        )
        return DeepSpeedConfig.from_value(config).resolve(settings)


# With equal seconds the first is chosen.
PLACEMENTS = [
    Placement(0),
    Placement(1),
    Placement(2),
    Placement(2, "micro_batch"),
    Placement(3, resharded=False),
    Placement(3),
    Placement(3, hpz=True),
    Placement(3, "micro_batch"),
    Placement(3, "micro_batch", hpz=True),
    Placement(2, offload=True),
    Placement(3, "micro_batch", offload=True),
]


def bucket_size(world_size: int, num_bytes: float, network: float) -> int:
    """
    Elements of a bucket whose transfer takes ten times the latency of a ring through all nodes, at
    most DeepSpeed's 5·10⁸.
    """
    hops = GPUS_PER_NODE + world_size // GPUS_PER_NODE
    needed = 10 * LATENCY * hops / _transfer(_BF16, world_size, network)
    steps = 10 ** math.floor(math.log10(needed))
    return int(min(steps * math.ceil(needed / steps), 5e8, num_bytes / _BF16))


def _transfer(num_bytes: float, world_size: int, network: float) -> float:
    """
    Seconds in which every rank gets, or reduces and scatters, all of `num_bytes`: each node
    receives what it doesn't have, and each GPU passes it on.
    """
    num_nodes = world_size // GPUS_PER_NODE
    between = num_bytes * (1 - 1 / num_nodes) / network
    return max(between, num_bytes / NVLINK)


def communication(
    placement: Placement, num_bytes: float, accumulation: int, world_size: int, network: float
) -> float:
    """Seconds of a step's collectives, and of its transfers to CPU memory."""
    once = _transfer(num_bytes, world_size, network)
    reductions = 1 if placement.synchronization == "step" else accumulation
    if placement.stage < 3:
        seconds = (reductions + 1) * once
    else:
        gathers = 2 * accumulation if placement.resharded else 1
        within = _transfer(num_bytes, GPUS_PER_NODE, network)
        gathered = once + (gathers - 1) * within if placement.hpz else gathers * once
        seconds = reductions * once + gathered
    if placement.offload:
        # A shard's gradients and weights cross the link. Adam reads 16 bytes for each parameter in
        # CPU memory, gradients included, and writes 14.
        shard = num_bytes / world_size
        seconds += 2 * shard / HOST_LINK + 30 / _BF16 * shard * GPUS_PER_NODE / CPU_UPDATE
    return seconds


class Row(NamedTuple):
    placement: Placement
    bucket: int
    gpu_bytes: float
    compute: float
    communication: float


def rows_of(decoder: Decoder, world_size: int, network: float) -> Iterator[Row]:
    """Returns the placements that fit."""
    size = decoder.size()
    num_bytes = float(size.total * _BF16)
    accumulation = accumulation_steps(world_size)
    # 6 operations for each parameter and token, and 2 that gradient checkpointing repeats.
    compute = 8 * size.total * MICRO_BATCH_TOKENS * accumulation / COMPUTE
    bucket = bucket_size(world_size, num_bytes, network)
    for placement in PLACEMENTS:
        resolved = placement.resolve(world_size, accumulation, bucket)
        adam = optimizer_bytes(torch.optim.AdamW, {}, size)
        once_a_step = placement.synchronization == "step"
        states = model_states(size, adam, resolved, world_size, once_a_step)
        gpu_bytes = states.gpu.total + decoder.activations()
        if gpu_bytes > USABLE * GPU_MEMORY or states.cpu.total * GPUS_PER_NODE > CPU_MEMORY:
            continue
        seconds = communication(placement, num_bytes, accumulation, world_size, network)
        yield Row(placement, bucket, gpu_bytes, compute, seconds)


def accumulation_steps(world_size: int) -> int:
    return max(1, STEP_TOKENS // (world_size * MICRO_BATCH_TOKENS))


def run(settings: argparse.Namespace) -> None:
    data: Dict[str, Any] = {**report.heading(1), "rows": _table()}
    settings.page.write(data, text(data))


def _table() -> List[List[str]]:
    return [
        _cells(model, world_size, name)
        for model in MODELS
        for world_size in WORLD_SIZES
        for name in (NETWORKS if world_size > GPUS_PER_NODE else ("–",))
    ]


def _cells(model: str, world_size: int, network: str) -> List[str]:
    found: Tuple[Row, ...] = tuple(
        rows_of(MODELS[model], world_size, NETWORKS.get(network, math.inf))
    )
    accumulation = accumulation_steps(world_size)
    cells = [model, str(world_size), network, str(accumulation)]
    if not found:
        return [*cells, "none of these fits", *["–"] * 5]
    best = min(found, key=lambda row: row.communication)
    return [
        *cells,
        best.placement.name(),
        best.placement.keys(accumulation > 1),
        f"{best.bucket:.0e}".replace("e+0", "e"),
        f"{best.gpu_bytes / _GB:.0f}",
        f"{best.compute:.2f}",
        f"{best.communication:.2f}",
    ]


def text(data: Dict[str, Any]) -> str:
    """Returns the page with the assumptions and the table."""
    networks = ", ".join(f"{each / _GB:.0f} GB/s ({name})" for name, each in NETWORKS.items())
    headings = ["parameters", "GPUs", "network of a node", "micro-batches", "stage", "trainer"]
    headings += ["reduce_bucket_size", "GB per GPU", "s of compute", "s of communication"]
    return report.document(
        "Which ZeRO stage for which model and cluster",
        f"Computed, not measured. `python -m evidence placements` computes it again, and its "
        f"source has the formulas; commit {data['commit']}, {data['date']}.",
        f"A step has {STEP_TOKENS:,} tokens, and a micro-batch of a worker {MICRO_BATCH_TOKENS:,}. "
        "Models are decoders with the shapes of LLaMA, in bf16 with AdamW and gradient "
        f"checkpointing. A node has {GPUS_PER_NODE} GPUs of {GPU_MEMORY / _GB:.0f} GB, of which "
        f"{USABLE:.0%} may be used, and {CPU_MEMORY / _GB:,.0f} GB of CPU memory. A GPU computes "
        f"{COMPUTE / 1e12:.0f}·10¹² operations per second, and passes {NVLINK / _GB:.0f} GB/s "
        f"within its node; a node passes {networks} to others. A GPU exchanges "
        f"{HOST_LINK / _GB:.0f} GB/s with CPU memory, of which a node "
        f"reads and writes {CPU_UPDATE / _GB:.0f} GB/s in an update. A hop of a ring takes "
        f"{LATENCY * 1e6:.0f} µs.",
        "Of the placements that fit, the table has the one whose communication takes the fewest "
        "seconds per step, and of equals the lowest stage. Where communication overlaps with the "
        "backward pass, a step takes the larger of the two columns of seconds, else their sum. "
        "Memory is that of `allennlp deepspeed estimate`, with activations.",
        report.table(headings, data["rows"]),
        '- Stages 0 to 2 communicate as much with `"gradient_synchronization": "step"`. The '
        "lowest that fits has the fewest calls.\n"
        "- With micro-batches, stage 3 costs as much as stage 2 where the gathered weights stay "
        '(`"reshard_after_micro_batch": false`), and two gatherings for each micro-batch where '
        "they don't fit. hpZ moves these into the node, which counts where the network is slow.\n"
        "- Where a step has less compute than communication, larger micro-batches or more of them "
        "help, and another stage doesn't.\n"
        "- `allennlp deepspeed estimate config.jsonnet --workers N` counts the memory of your own "
        "model. Change the numbers at the top of the study's source to those of your cluster.",
    )
