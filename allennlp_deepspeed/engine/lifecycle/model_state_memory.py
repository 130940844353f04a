"""
Bytes of weights, gradients and optimizer states on each rank and device: the "model states" of the
[ZeRO paper](https://arxiv.org/abs/1910.02054) (section 3).

DeepSpeed's own `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`
aren't used: they assume 16-bit training of all parameters with Adam, and their figures are too low
even there. On each of N ranks they have 18/N bytes a parameter (plus 2 for the weights at stage 2),
where this module counts 20/N at stage 2 and 22/N at stage 3, because the gradient is flattened
before the step. They leave out the buckets (2 GB in fp32 by default), the parameters that stage 3
prefetches, NVMe, and stages 0 and 1. `python -m evidence model_states` compares the figures below
with measurements and with the paper.
"""

import math
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Dict, Mapping, Optional, Sequence, Type

import torch

from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedZeroConfig, DtypeEnum
from allennlp_deepspeed.engine.optimizers.lion import LionOptimizer
from allennlp_deepspeed.engine.parameters.shards import full_shape

_FP32 = torch.float32.itemsize

CUDA_CONTEXT = 500_000_000
"""
Bytes that a process takes on its GPU before its first tensor: 450 to 800 MB, for the driver's
context and the kernels that are loaded ([#34323](https://github.com/pytorch/pytorch/issues/34323)).
"""

NCCL_COMMUNICATOR = 2 * 32 * 4 * 2**20
"""
Bytes of a communicator: `NCCL_BUFFSIZE`, 4 MiB by default, to send and to receive in each of up to
32 channels ([NCCL](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)).
"""

# The maximum number of elements that the engine's own all-reduce flattens at once.
_ALL_REDUCE_SIZE = 500_000_000


@dataclass(frozen=True)
class ModelSize:
    """
    Numbers of elements of a model's parameters. Tied parameters are counted once.

    # Parameters

    trainable : `Sequence[int]`
        The elements of each trainable parameter.
    frozen : `Sequence[int]`
        The elements of each frozen parameter.
    largest_module : `int`
        The elements of the largest module's own parameters, without those of its submodules, which
        are needed at once.
    """

    trainable: Sequence[int]
    frozen: Sequence[int]
    largest_module: int

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> "ModelSize":
        """
        Returns the size of a model, whose parameters may be partitioned or on the meta device.
        """
        elements = [(p.requires_grad, full_shape(p).numel()) for p in model.parameters()]
        return cls(
            trainable=[number for is_trained, number in elements if is_trained],
            frozen=[number for is_trained, number in elements if not is_trained],
            largest_module=max(elements_of_modules(model).values()),
        )

    @property
    def largest_parameter(self) -> int:
        return max([*self.trainable, *self.frozen], default=0)

    @property
    def total(self) -> int:
        return sum(self.trainable) + sum(self.frozen)


def elements_of_modules(model: torch.nn.Module) -> Dict[str, int]:
    """
    Returns by name the elements of each module's own parameters, without those of its submodules.
    """
    return {
        name: sum(full_shape(p).numel() for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }


# Optimizers with one state value for each weight.
_SINGLE_STATE_OPTIMIZERS = (torch.optim.Adagrad, torch.optim.ASGD, LionOptimizer)


def optimizer_bytes(
    optimizer: Type[torch.optim.Optimizer], settings: Mapping[str, Any], size: ModelSize
) -> int:
    """
    Returns the bytes of optimizer states for all trainable parameters, in addition to the weights.
    An unknown optimizer is assumed to have two values for each weight, as Adam has.

    # Parameters

    optimizer : `Type[torch.optim.Optimizer]`
    settings : `Mapping[str, Any]`
        The optimizer's arguments, as in a config file.
    size : `ModelSize`
    """
    if issubclass(optimizer, torch.optim.SGD):
        num_states = 1 if settings.get("momentum") else 0
    elif issubclass(optimizer, torch.optim.RMSprop):
        num_states = 1 + bool(settings.get("momentum")) + bool(settings.get("centered"))
    elif issubclass(optimizer, _SINGLE_STATE_OPTIMIZERS):
        num_states = 1
    else:
        num_states = 3 if settings.get("amsgrad") else 2
    return num_states * _FP32 * sum(size.trainable)


@dataclass(frozen=True)
class Bytes:
    """
    Bytes of one rank on one device.

    # Parameters

    weights : `int`
        The weights of the forward pass.
    gradients : `int`
        The peak of gradients from the end of the backward pass to the optimizer step, which needs
        them in fp32.
    optimizer : `int`
        The optimizer states, and the fp32 master weights if they are separate from `weights`.
    buffers : `int`
        The buffers that gather parameters, reduce gradients and transfer to and from NVMe.
    average : `int`
        The moving average: its values, and the weights that it replaces in a validation.
    saves : `int`
        The copies that asynchronous saves write, and what a parameter that is gathered for a save
        takes in addition to the peak of gradients, which are gone by then.
    runtime : `int`
        The CUDA context and NCCL's communicator.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    average: int = 0
    saves: int = 0
    runtime: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: "Bytes") -> "Bytes":
        """Adds up the bytes of two devices."""
        return Bytes(*map(sum, zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class ModelStates:
    """
    Model states of one rank on each device. Activations, the model's own buffers, temporary memory
    of operations and fragmentation aren't counted.
    """

    gpu: Bytes = field(default_factory=Bytes)
    cpu: Bytes = field(default_factory=Bytes)
    nvme: Bytes = field(default_factory=Bytes)


def model_states(
    size: ModelSize,
    optimizer_states: int,
    config: ResolvedConfig,
    world_size: int,
    reduces_once_a_step: bool = False,
    has_chunks: bool = False,
    has_moving_average: bool = False,
    saves_asynchronously: bool = False,
) -> ModelStates:
    """
    Estimates the model states of one rank, and what is needed to average and save them.

    # Parameters

    size : `ModelSize`
    optimizer_states : `int`
        The result of `optimizer_bytes`.
    config : `ResolvedConfig`
        It has the stage, the precision, offload and the sizes of buffers.
    world_size : `int`
    reduces_once_a_step : `bool`, optional (default = `False`)
        Whether an unsharded gradient is accumulated over the micro-batches of a step.
    has_chunks : `bool`, optional (default = `False`)
        Whether each micro-batch has chunks, as with `grad_cache`, which count as micro-batches.
    has_moving_average : `bool`, optional (default = `False`)
    saves_asynchronously : `bool`, optional (default = `False`)
        Whether checkpoints are written from a copy. Rank 0, which also saves the weights that all
        ranks have, is the one that is estimated.
    """
    reduces_later = reduces_once_a_step and world_size > 1 and (config.accumulates or has_chunks)
    figures = _States(size, optimizer_states, config, world_size, reduces_later)
    of_stage = {0: figures.stage_0, 3: figures.stage_3}
    states = of_stage.get(config.zero_stage, figures.stage_1_or_2)()
    return figures.with_average_and_saves(states, has_moving_average, saves_asynchronously)


class _States:
    """Figures that the stages have in common. Parameters are counted in elements, not bytes."""

    def __init__(
        self,
        size: ModelSize,
        optimizer_states: int,
        config: ResolvedConfig,
        world_size: int,
        reduces_later: bool,
    ) -> None:
        self._size = size
        self._optimizer_states = optimizer_states
        self._stage = config.zero_stage
        self._world_size = world_size
        # "auto" uses free memory only.
        self._keeps_parameters = config.reshard_after_micro_batch is False
        self._trained = sum(size.trainable)
        config = config.limit_buckets(self._trained)
        self._zero = DeepSpeedZeroConfig(**config.engine_config.get("zero_optimization", {}))
        # Bytes of an element of the weights, and of an accumulated gradient.
        self._weight = _itemsize(config.precision)
        kept = config.engine_config.get("data_types", {}).get("grad_accum_dtype")
        self._gradient = self._weight if kept is None else _itemsize(kept)
        self._accumulated = self._trained if reduces_later else 0
        self._optimizer_device = _device(self._zero.offload_optimizer)
        self._parameter_device = _device(self._zero.offload_param)
        self._is_bf16_optimizer = (
            self._stage == 1 and config.precision == "bf16" and self._optimizer_device == "none"
        )

    def stage_0(self) -> ModelStates:
        is_half = self._weight < _FP32
        all_reduced = min(self._trained, _ALL_REDUCE_SIZE) if self._world_size > 1 else 0
        return ModelStates(
            gpu=Bytes(
                weights=self._size.total * self._weight,
                # Before the step all gradients exist in fp32 too.
                gradients=self._trained * (self._weight + (_FP32 if is_half else 0)),
                optimizer=self._optimizer_states + (self._trained * _FP32 if is_half else 0),
                buffers=all_reduced * self._weight,
            )
        )

    def stage_1_or_2(self) -> ModelStates:
        shard = self._shard
        weights = (shard * self._world_size + sum(self._size.frozen)) * self._weight
        # DeepSpeed copies the shard in fp32 even if the weights are in fp32.
        optimizer = shard * _FP32 + self._optimizer_states_of(shard)
        num_buckets = 2 if self._zero.overlap_comm else 1
        buckets = num_buckets * int(self._zero.reduce_bucket_size) * self._weight
        if self._optimizer_device == "none":
            gradients = max(self._reduced_gradient(shard), self._flattened_gradient(shard))
            return ModelStates(gpu=Bytes(weights, gradients, optimizer, buckets))
        one_gradient = self._size.largest_parameter * self._weight
        return ModelStates(
            gpu=Bytes(weights, self._unsharded_gradient(), buffers=buckets + one_gradient),
            cpu=Bytes(
                gradients=shard * _FP32,
                optimizer=optimizer,
                # The new weights that are copied to the GPU, and a gradient that is copied from it.
                buffers=shard * self._weight + one_gradient,
            ),
        )

    def stage_3(self) -> ModelStates:
        shard = self._shard
        frozen = sum(math.ceil(elements / self._world_size) for elements in self._size.frozen)
        gpu = Bytes(
            weights=self._kept_gathered() * self._weight,
            gradients=self._unsharded_gradient(),
            buffers=self._gathered() + int(self._zero.reduce_bucket_size) * self._weight,
        )
        cpu = nvme = Bytes()
        weights = Bytes(weights=(shard + frozen) * self._weight)
        if self._parameter_device == "none":
            gpu += weights
        elif self._parameter_device == "cpu":
            cpu += weights
        else:
            offload = self._zero.offload_param
            on_cpu = min(shard, int(offload.max_in_cpu))
            buffers = int(offload.buffer_count) * int(offload.buffer_size)
            cpu += Bytes(weights=on_cpu * self._weight, buffers=buffers * self._weight)
            nvme += Bytes(weights=(shard - on_cpu + frozen) * self._weight)

        # A copy of the shard in fp32, even if the weights are in fp32: the check whether the copy
        # is needed compares a device with a name.
        optimizer = shard * _FP32 + self._optimizer_states_of(shard)
        gradients = shard * self._gradient
        sub_group = min(shard, int(self._zero.sub_group_size))
        if self._optimizer_device == "none":
            # Gradients are flattened, and converted to fp32, one sub-group at a time, when the
            # unsharded gradient has been released.
            in_fp32 = 0 if self._gradient == _FP32 else _FP32
            flattened = sub_group * (self._gradient + in_fp32)
            gradients += max(0, flattened - self._unsharded_gradient())
            gpu += Bytes(gradients=gradients, optimizer=optimizer)
        elif self._optimizer_device == "cpu":
            cpu += Bytes(gradients=gradients + shard * _FP32, optimizer=optimizer)
        else:
            nvme += Bytes(gradients=shard * _FP32, optimizer=optimizer)
            buffers = int(self._zero.offload_optimizer.buffer_count) * sub_group * _FP32
            cpu += Bytes(gradients=gradients, buffers=buffers)
        return ModelStates(gpu, cpu, nvme)

    def with_average_and_saves(
        self, states: ModelStates, has_moving_average: bool, saves_asynchronously: bool
    ) -> ModelStates:
        """Adds what the moving average and saves need. Elsewhere than on the GPU is on the CPU."""
        optimizer = states.gpu.optimizer + states.cpu.optimizer
        # Both its values and the weights that it replaces are in fp32.
        values = self._shard * _FP32 if has_moving_average else 0
        copies = 0
        if saves_asynchronously and states.nvme.optimizer == 0:
            sharers = self._world_size if self._stage == 3 else 1
            weights = sum(math.ceil(numel / sharers) for numel in self._size.frozen)
            if self._stage == 0 and self._weight == _FP32:  # which the optimizer updates
                weights += self._trained
            copies = optimizer + values + weights * self._weight
        gathered = 0
        if self._stage > 0:
            # What stage 3 has of gradients until the next step isn't free.
            kept = self._shard * self._gradient if self._stage == 3 else 0
            free = max(0, states.gpu.gradients - kept)
            gathered = max(0, self._size.largest_parameter * _FP32 - free)
        is_on_gpu = self._optimizer_device == "none"
        return replace(
            states,
            gpu=replace(states.gpu, average=2 * values if is_on_gpu else 0, saves=gathered),
            cpu=replace(states.cpu, average=0 if is_on_gpu else 2 * values, saves=copies),
        )

    @property
    def _shard(self) -> int:
        """The elements of the trainable parameters that this rank updates."""
        if self._stage == 0:
            return self._trained
        if self._stage == 3:
            return sum(math.ceil(n / self._world_size) for n in self._size.trainable)
        # DeepSpeed aligns shards to two elements.
        return 2 * math.ceil(self._trained / (2 * self._world_size))

    def _optimizer_states_of(self, shard: int) -> int:
        return math.ceil(self._optimizer_states * shard / max(self._trained, 1))

    def _unsharded_gradient(self) -> int:
        """Returns the bytes of a rank's gradient before it is sharded."""
        accumulated = self._trained if self._stage == 1 else self._accumulated
        # DeepSpeed's BF16_Optimizer has it in both precisions.
        is_twice = self._is_bf16_optimizer and self._gradient != self._weight
        return accumulated * (self._gradient + (self._weight if is_twice else 0))

    def _reduced_gradient(self, shard: int) -> int:
        """
        Returns the bytes of gradients at stages 1 and 2 when the last one is reduced, often that of
        an embedding. One that is larger than the bucket is copied for it.
        """
        if self._stage == 1:
            return self._unsharded_gradient()
        largest = max(self._size.trainable, default=0)
        copied = largest if largest > self._zero.reduce_bucket_size else 0
        whole = self._unsharded_gradient() or largest * self._gradient
        return whole + (shard + copied) * self._gradient

    def _flattened_gradient(self, shard: int) -> int:
        """Returns the bytes of the shard's gradient at stages 1 and 2 when the step begins."""
        if self._gradient == self._weight:
            # The reduced gradient, a flattened copy, and an fp32 copy.
            return shard * (2 * self._gradient + (0 if self._gradient == _FP32 else _FP32))
        return shard * _FP32

    def _kept_gathered(self) -> int:
        """Returns the elements of small parameters that stay gathered at stage 3."""
        kept = 0
        for elements in [*self._size.trainable, *self._size.frozen]:
            is_small = elements <= self._zero.param_persistence_threshold
            if is_small and kept + elements <= self._zero.model_persistence_threshold:
                kept += elements
        return kept

    def _gathered(self) -> int:
        """
        Returns the bytes of other parameters that are gathered at once. A parameter that is used
        again within `stage3_max_reuse_distance` is not released: at the end of the forward pass
        these are the parameters of half that distance, since the backward pass returns through
        them.
        """
        fetched = self._size.largest_module + int(self._zero.prefetch_bucket_size)
        gathered = min(
            self._size.total - self._kept_gathered(),
            int(self._zero.max_reuse_distance) // 2 + fetched,
        )
        if self._keeps_parameters:
            gathered = self._size.total - self._kept_gathered()
        if self._zero.zero_hpz_partition_size > 1:
            gathered += self._size.total // int(self._zero.zero_hpz_partition_size)
        return gathered * self._weight


def _itemsize(dtype: str) -> int:
    return DtypeEnum("fp32" if dtype == "torch_autocast" else dtype).value.itemsize


def _device(offload: Optional[Any]) -> str:
    return "none" if offload is None else str(offload.device)
