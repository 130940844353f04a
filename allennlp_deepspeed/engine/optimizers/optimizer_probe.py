"""
Tests whether an optimizer updates shards of weights as it updates full weights: on a few small
tensors, with a copy of the optimizer for each worker.
"""

import copy
import itertools
from collections import defaultdict
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import torch

from allennlp_deepspeed.engine.optimizers.sub_group_steps import SubGroupSteps

# A matrix with more elements than 8-bit optimizers leave in fp32, and vectors, which optimizers for
# matrices refuse.
_SHAPES = (((96, 64), (96,), (64,)), ((96, 64), (16, 8), (8, 4)))
_MOST_GROUPS = 4
_LEAST, _LEARNING_RATE, _MOST = 1e-6, 1e-3, 1e3
# The size of the gradients of each step: enough steps for warm-ups and averages of slow weights.
_SCALES = 6 * (1.0, 0.1, 0.01, 3.0, 0.3)
# The part of an update by which rounding may change it.
_TOLERANCE = 1e-3

Groups = List[List[torch.Tensor]]


def updates_shards_as_weights(
    optimizer: torch.optim.Optimizer, zero_stage: int, world_size: int, device: torch.device
) -> Optional[bool]:
    """
    Returns whether an optimizer makes the same updates if it gets flat shards of each of its
    groups, as at ZeRO stages 1 to 3. Returns `None` if that can't be tested: the optimizer can't be
    copied, its step fails, or it changes the weights by little more than rounding.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        It isn't changed.
    zero_stage : `int`, required.
    world_size : `int`, required.
    device : `torch.device`, required.
    """
    # Compiling an optimizer takes a minute.
    with (
        # Each step of PyTorch's asks CUDA whether it is capturing, which would begin to use a GPU.
        mock.patch.object(torch.cuda, "is_available", lambda: False)
        if device.type == "cpu"
        else nullcontext(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        # An optimizer with a kernel of its own may not support fp64, in which small updates differ
        # from rounding.
        for shapes, dtype in itertools.product(_SHAPES, (torch.float64, torch.float32)):
            with suppress(Exception):
                test = _Test(optimizer, zero_stage, min(world_size, 2), device, dtype, shapes)
                for _ in test.steps_of_full_weights():
                    if not test.step_shards():
                        return False
                return True if test.is_conclusive else None
    return None


class _Test:
    """Trains full weights and shards of them with copies of an optimizer, step by step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stage: int,
        num_shards: int,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Sequence[Tuple[int, ...]],
    ) -> None:
        self._shapes = shapes
        self._stage = stage
        self._num_shards = num_shards
        self._device = device
        self._dtype = dtype
        # More have no other kind of update, and the time grows with the square of their number.
        self._num_groups = min(len(optimizer.param_groups), _MOST_GROUPS)
        self._generator = torch.Generator().manual_seed(0)
        self._start = self._random_groups(0.02)
        self._full = _Copy(optimizer, self._start)
        self._shards = [
            _Copy(optimizer, self._shard(self._start, rank)) for rank in range(num_shards)
        ]
        self._largest_update = 0.0
        self._rounding = len(_SCALES) * torch.finfo(dtype).eps * float(_flatten(self._start).max())

    @property
    def is_conclusive(self) -> bool:
        """Returns whether updates were larger than what rounding may change."""
        return _TOLERANCE * self._largest_update > self._rounding

    def steps_of_full_weights(self) -> Iterator[None]:
        """Yields after each step."""
        target = self._random_groups(1)
        for scale in _SCALES:
            weights, noise = self._full.weights, self._random_groups(1)
            self._gradients = [
                [scale * (w - t + n) for w, t, n in zip(*group)]
                for group in zip(weights, target, noise)
            ]
            self._full.step(self._gradients)
            yield

    def step_shards(self) -> bool:
        """Makes the same step with the shards, and returns whether the weights are the same."""
        for rank, shards in enumerate(self._shards):
            try:
                shards.step_sub_groups(self._shard(self._gradients, rank), self._stage)
            except Exception:
                return False
            start, expected = (
                _flatten(self._shard(each, rank)) for each in (self._start, self._full.weights)
            )
            update = float((expected - start).abs().max())
            self._largest_update = max(self._largest_update, update)
            allowed = _TOLERANCE * self._largest_update + self._rounding
            if not (_flatten(shards.weights) - expected).abs().max() <= allowed:
                return False
        return True

    def _random_groups(self, scale: float) -> Groups:
        return [
            [
                torch.randn(shape, generator=self._generator)
                .mul_(scale)
                .to(self._device, self._dtype)
                for shape in self._shapes
            ]
            for _ in range(self._num_groups)
        ]

    def _shard(self, groups: Groups, rank: int) -> Groups:
        """Returns a rank's shards: one for each group, and at stage 3 one for each sub-group."""
        if self._stage == 3:
            sub_groups = [[group[:2], group[2:]] for group in groups]
        else:
            sub_groups = [[group] for group in groups]
        return [
            [
                torch.cat([tensor.flatten() for tensor in tensors]).chunk(self._num_shards)[rank]
                for tensors in group
            ]
            for group in sub_groups
        ]


class _Copy:
    """Copy of an optimizer, without its states and hooks, that trains copies of tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Groups) -> None:
        self.weights = [[weight.clone() for weight in group] for group in weights]
        self._optimizer = _copy(optimizer, self.weights)
        if hasattr(self._optimizer, "train"):
            self._optimizer.train()
        self._steps = SubGroupSteps(self._optimizer)

    def step(self, gradients: Groups) -> None:
        self._set_gradients(gradients)
        self._optimizer.step()  # type: ignore[call-arg]

    def step_sub_groups(self, gradients: Groups, zero_stage: int) -> None:
        """
        Makes a step by one call for each tensor, as DeepSpeed does: the other groups are left out,
        or at stage 3 empty.
        """
        self._set_gradients(gradients)
        groups = self._optimizer.param_groups
        self._steps.start()
        for index, (group, weights) in enumerate(zip(groups, self.weights)):
            for weight in weights:
                for other in groups:
                    other["params"] = []
                group["params"] = [weight]
                self._steps.step_sub_group(index, partial(self._step_group, index, zero_stage))
        self._steps.finish()

    def _step_group(self, index: int, zero_stage: int) -> None:
        groups = self._optimizer.param_groups
        if zero_stage < 3:
            self._optimizer.param_groups = [groups[index]]
        self._optimizer.step()  # type: ignore[call-arg]
        self._optimizer.param_groups = groups

    def _set_gradients(self, gradients: Groups) -> None:
        for weights, gradients_of_group in zip(self.weights, gradients):
            for weight, gradient in zip(weights, gradients_of_group):
                weight.grad = gradient.clone()


def _copy(optimizer: torch.optim.Optimizer, weights: Groups) -> torch.optim.Optimizer:
    copied = object.__new__(type(optimizer))
    memo: Dict[int, Any] = {id(optimizer): copied}
    for group in optimizer.param_groups:
        memo.update({id(parameter): parameter for parameter in group["params"]})
    for name, value in vars(optimizer).items():
        # A schedule replaces `step` by a function that steps the optimizer that is copied.
        is_method = callable(value) and hasattr(type(optimizer), name)
        if not (is_method or name in ("state", "param_groups") or name.endswith("_hooks")):
            vars(copied)[name] = copy.deepcopy(value, memo)
    param_groups = [
        {
            **copy.deepcopy({k: v for k, v in group.items() if k != "params"}, memo),
            # A warm-up may begin at 0, where no update shows anything, and at 1e30 none is finite.
            **({"lr": _LEARNING_RATE} if _is_extreme(group.get("lr")) else {}),
            "params": list(weights_of_group),
        }
        for group, weights_of_group in zip(optimizer.param_groups, weights)
    ]
    # It adds the hooks.
    copied.__setstate__({"state": defaultdict(dict), "param_groups": param_groups})
    return copied


def _is_extreme(learning_rate: Any) -> bool:
    return isinstance(learning_rate, (int, float)) and not _LEAST <= learning_rate <= _MOST


def _flatten(groups: Groups) -> torch.Tensor:
    return torch.cat([tensor.flatten() for group in groups for tensor in group])
