"""
Tests whether an optimizer updates shards of weights as it updates full weights: on a few small
tensors, with a copy of the optimizer for each worker.
"""

import copy
import itertools
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, DefaultDict, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import torch

from allennlp_deepspeed.engine.optimizers.sub_group_steps import SubGroupSteps

# A matrix with more elements than 8-bit optimizers leave in fp32, and vectors, which optimizers for
# matrices refuse.
_SHAPES = (((96, 64), (96,), (64,)), ((96, 64), (16, 8), (8, 4)))
_MOST_GROUPS = 4
_LEAST, _LEARNING_RATE, _MOST = 1e-6, 1e-3, 1e3
# The size of the weights at the start, and of the gradients of each step. The first run has enough
# steps for warm-ups and averages of slow weights. In the second, weight decay is a large part of
# the updates.
_RUNS = ((0.02, 6 * (1.0, 0.1, 0.01, 3.0, 0.3)), (1.0, 5 * (1e-4,)))
# The part of an update by which rounding may change it. Adam's decay may be 1e-4 of its update.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
# Types of the attributes of parameters that an optimizer may read.
_PLAIN = (int, float, str, list, tuple, torch.Tensor)

Groups = List[List[torch.Tensor]]


def updates_shards_as_weights(
    optimizer: torch.optim.Optimizer, zero_stage: int, world_size: int, device: torch.device
) -> Optional[bool]:
    """
    Returns whether an optimizer makes the same updates if it gets flat shards of each of its
    groups, as at ZeRO stages 1 to 3, or at stage 0 full weights without the attributes of the
    parameters, as master weights are. Returns `None` if that can't be tested: the optimizer can't
    be copied, its step fails, or it changes the weights by little more than rounding.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        It isn't changed.
    zero_stage : `int`, required.
    world_size : `int`, required.
    device : `torch.device`, required.
    """
    with _isolated(device):
        # An optimizer with a kernel of its own may not support fp64, in which small updates differ
        # from rounding.
        for shapes, dtype in itertools.product(_SHAPES, (torch.float64, torch.float32)):
            with suppress(Exception):
                tests = [
                    _Test(optimizer, zero_stage, min(world_size, 2), device, dtype, shapes, *run)
                    for run in _RUNS
                ]
                for test in tests:
                    for _ in test.steps_of_full_weights():
                        if not test.step_shards():
                            return False
                return True if tests[0].is_conclusive else None
    return None


def effect_of_zero_grad(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """
    Returns what `zero_grad` of an optimizer does instead of, or in addition to, setting gradients
    to `None`. Returns `None` if that is nothing, or can't be tested.
    """
    weights = [[torch.ones(2, 2) for _ in range(3)] for _ in optimizer.param_groups]
    with _isolated(torch.device("cpu")), suppress(Exception):
        test = _Copy(optimizer, weights, is_full=True)
        copied: Any = test.optimizer
        # The first call may set what later ones don't change, and a step makes states.
        copied.zero_grad()
        with suppress(Exception):
            test.step(weights)
        test.set_gradients(weights)
        before = repr(vars(copied))
        copied.zero_grad()
        if repr(vars(copied)) != before:
            return "changes its groups, states or attributes"
        gradients = (weight.grad for group in test.weights for weight in group)
        if any(gradient is not None and not gradient.any() for gradient in gradients):
            return "sets gradients to zeros"
    return None


def users_attributes(optimizer: torch.optim.Optimizer) -> Dict[str, List[Any]]:
    """Returns the different values of each attribute that the optimizer's parameters have."""
    found: DefaultDict[str, Dict[str, Any]] = defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in vars(parameter).items():
                if isinstance(value, _PLAIN) and not name.startswith("ds_"):  # DeepSpeed's
                    found[name][str(value)] = value
    return {name: list(values.values()) for name, values in found.items()}


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Context manager in which steps have no effects on random numbers, and don't compile."""
    # Compiling an optimizer takes a minute.
    with (
        # Each step of PyTorch's asks CUDA whether it is capturing, which would begin to use a GPU.
        mock.patch.object(torch.cuda, "is_available", lambda: False)
        if device.type == "cpu"
        else nullcontext(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


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
        start_scale: float,
        gradient_scales: Sequence[float],
    ) -> None:
        self._shapes = shapes
        self._stage = stage
        self._num_shards = num_shards
        self._device = device
        self._dtype = dtype
        # More have no other kind of update, and the time grows with the square of their number.
        self._num_groups = min(len(optimizer.param_groups), _MOST_GROUPS)
        self._generator = torch.Generator().manual_seed(0)
        self._gradient_scales = gradient_scales
        self._start = self._random_groups(start_scale)
        self._full = _Copy(optimizer, self._start, is_full=True)
        self._shards = [
            _Copy(optimizer, self._shard(self._start, rank)) for rank in range(num_shards)
        ]
        self._largest_update = 0.0
        largest_weight = float(_flatten(self._start).abs().max())
        self._rounding = len(gradient_scales) * torch.finfo(dtype).eps * largest_weight
        self._tolerance = _TOLERANCES[dtype]

    @property
    def is_conclusive(self) -> bool:
        """Returns whether updates were larger than what rounding may change."""
        return self._tolerance * self._largest_update > self._rounding

    def steps_of_full_weights(self) -> Iterator[None]:
        """Yields after each step."""
        target = self._random_groups(1)
        for scale in self._gradient_scales:
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
                gradients = self._shard(self._gradients, rank)
                if self._stage == 0:
                    shards.step(gradients)
                else:
                    shards.step_sub_groups(gradients, self._stage)
            except Exception:
                return False
            start, expected = (
                _flatten(self._shard(each, rank)) for each in (self._start, self._full.weights)
            )
            update = float((expected - start).abs().max())
            self._largest_update = max(self._largest_update, update)
            allowed = self._tolerance * self._largest_update + self._rounding
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
        """
        Returns a rank's shards: one for each group, and at stage 3 one for each sub-group. Returns
        the full weights at stage 0.
        """
        if self._stage == 0:
            return groups
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
    """
    Copy of an optimizer, without its states and hooks, that trains copies of tensors. Full weights
    have the attributes of the parameters, and replace them also in an inner optimizer. DeepSpeed
    puts shards only into `param_groups`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, weights: Groups, is_full: bool = False
    ) -> None:
        self.weights = [[weight.clone() for weight in group] for group in weights]
        self.optimizer = _copy(optimizer, self.weights, is_full)
        if is_full:
            for name, values in users_attributes(optimizer).items():
                for group in self.weights:
                    for weight, value in zip(group, itertools.cycle(values)):
                        vars(weight)[name] = copy.deepcopy(value)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self._steps = SubGroupSteps(self.optimizer)

    def step(self, gradients: Groups) -> None:
        self.set_gradients(gradients)
        # Noise must be the same if the weights have the same shapes.
        torch.default_generator.manual_seed(0)
        self.optimizer.step()  # type: ignore[call-arg]

    def step_sub_groups(self, gradients: Groups, zero_stage: int) -> None:
        """
        Makes a step by one call for each tensor, as DeepSpeed does: the other groups are left out,
        or at stage 3 empty.
        """
        self.set_gradients(gradients)
        groups = self.optimizer.param_groups
        self._steps.start()
        for index, (group, weights) in enumerate(zip(groups, self.weights)):
            for weight in weights:
                for other in groups:
                    other["params"] = []
                group["params"] = [weight]
                self._steps.step_sub_group(index, partial(self._step_group, index, zero_stage))
        self._steps.finish()

    def _step_group(self, index: int, zero_stage: int) -> None:
        groups = self.optimizer.param_groups
        if zero_stage < 3:
            self.optimizer.param_groups = [groups[index]]
        self.optimizer.step()  # type: ignore[call-arg]
        self.optimizer.param_groups = groups

    def set_gradients(self, gradients: Groups) -> None:
        for weights, gradients_of_group in zip(self.weights, gradients):
            for weight, gradient in zip(weights, gradients_of_group):
                weight.grad = gradient.clone()


def _copy(
    optimizer: torch.optim.Optimizer, weights: Groups, is_full: bool
) -> torch.optim.Optimizer:
    copied = object.__new__(type(optimizer))
    param_groups: List[Dict[str, Any]] = []
    state: DefaultDict[Any, Any] = defaultdict(dict)
    # An inner optimizer may share the groups and states.
    memo: Dict[int, Any] = {
        id(optimizer): copied,
        id(optimizer.param_groups): param_groups,
        id(optimizer.state): state,
    }
    unused = torch.zeros_like(weights[0][0])
    for group in optimizer.param_groups:
        memo.update({id(parameter): unused for parameter in group["params"]})
    if is_full:
        for group, tensors in zip(optimizer.param_groups, weights):
            memo.update({id(p): weight for p, weight in zip(group["params"], tensors)})
    for group, tensors in zip(optimizer.param_groups, weights):
        values = {name: value for name, value in group.items() if name != "params"}
        for name, value in values.items():
            # It may have a value for each parameter.
            if isinstance(value, list) and len(value) == len(group["params"]):
                values[name] = _different_first(value)
        memo[id(group)] = {
            **copy.deepcopy(values, memo),
            # A warm-up may begin at 0, where no update shows anything, and at 1e30 none is finite.
            **({"lr": _LEARNING_RATE} if _is_extreme(group.get("lr")) else {}),
            "params": list(tensors),
        }
        param_groups.append(memo[id(group)])
    for name, value in vars(optimizer).items():
        # A schedule replaces `step` by a function that steps the optimizer that is copied.
        is_method = callable(value) and hasattr(type(optimizer), name)
        if not (is_method or name in ("state", "param_groups") or name.endswith("_hooks")):
            vars(copied)[name] = copy.deepcopy(value, memo)
    # It adds the hooks.
    copied.__setstate__({"state": state, "param_groups": param_groups})
    return copied


def _different_first(values: List[Any]) -> List[Any]:
    """Moves values that differ to the front, because a test has only a few weights."""
    texts = [str(value) for value in values]
    order = sorted(range(len(values)), key=lambda i: texts.index(texts[i]) < i)
    return [values[i] for i in order]


def _is_extreme(learning_rate: Any) -> bool:
    return isinstance(learning_rate, (int, float)) and not _LEAST <= learning_rate <= _MOST


def _flatten(groups: Groups) -> torch.Tensor:
    return torch.cat([tensor.flatten() for group in groups for tensor in group])
