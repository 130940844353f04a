"""
Sequence tiling: computes modules that treat each position of a sequence by itself, such as the
feed-forward layers of a transformer, for a tile of positions at a time, so that their intermediate
activations are never in memory for a full sequence. It is `TiledMLP` of "Arctic Long Sequence
Training" (Bekman et al., 2025, https://arxiv.org/abs/2506.13996, section 3.2).
"""

import logging
import re
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Set, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from typing_extensions import override

from allennlp_deepspeed.config.structured_keys import SequenceTiling
from allennlp_deepspeed.deepspeed_api import (
    register_external_parameter,
    unregister_external_parameter,
)
from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import current_autocast
from allennlp_deepspeed.training.step_extension import StepExtension

# Enough positions that dropout with any probability drops one of their elements.
_CHECKED = 16

logger = logging.getLogger(__name__)

_KEY = "trainer.sequence_tiling"


class SequenceTiles(StepExtension):
    """Computes the modules that the key names tile by tile."""

    @classmethod
    @override
    def wrap(cls, value: Any, model: Model, zero_stage: int) -> Callable[[], None]:
        return tile_modules(model, value, zero_stage)


def tile_modules(
    model: torch.nn.Module, settings: SequenceTiling, zero_stage: int
) -> Callable[[], None]:
    """
    Makes the modules whose names match one of the patterns (by `re.search`) compute tile by tile,
    and recompute in the backward pass. Lists of modules, which have no forward pass, and modules
    inside other matching modules are skipped. Must be called before the engine is initialized.

    # Parameters

    model : `torch.nn.Module`, required.
    settings : `SequenceTiling`, required.
    zero_stage : `int`, required.
        The ZeRO stage of the engine.

    # Returns

    `Callable[[], None]`
        A function that restores the modules.

    # Raises

    `ConfigurationError`
        If a pattern matches nothing, or a module that may compute something else when recomputed.
    """
    names: List[str] = []
    modules = dict(model.named_modules())
    collected = _collected(model)
    for pattern in settings["modules"]:
        matching = [n for n in modules if n and re.search(pattern, n) and _has_forward(modules[n])]
        if not matching:
            raise ConfigurationError(
                f"'{_KEY}.modules' has {pattern!r}, which matches the name of no module. Write "
                'regular expressions for the names of feed-forward layers, such as "mlp$".'
            )
        names += [n for n in matching if not any(n.startswith(f"{other}.") for other in matching)]
    with ExitStack() as undo:
        for name in dict.fromkeys(names):
            _check(modules[name], name, collected)
            undo.enter_context(
                _tile_forward(modules[name], name, settings["num_tiles"], zero_stage)
            )
        logger.info("Sequence tiling in %s", ", ".join(dict.fromkeys(names)))
        return undo.pop_all().close


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _collected(model: torch.nn.Module) -> Dict[str, str]:
    """
    Returns the names of modules whose outputs transformers collect in a forward pass, with the
    settings that make them.
    """
    collected: Dict[str, str] = {}
    for prefix, module in model.named_modules():
        recorders: Dict[str, Any] = getattr(module, "_can_record_outputs", None) or {}
        for what, kinds in recorders.items():
            if getattr(module.config, f"output_{what}", False):
                for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
                    target: Any = getattr(kind, "target_class", kind)
                    layer = (getattr(kind, "layer_name", None) or "").strip(".")
                    for name, inner in module.named_modules(prefix=prefix):
                        if isinstance(inner, target) and f"{layer}." in f".{name}.":
                            collected[name] = f"output_{what}"
    return collected


def _check(module: torch.nn.Module, name: str, collected: Dict[str, str]) -> None:
    for inner_name, inner in module.named_modules(prefix=name):
        if inner_name in collected:
            setting = collected[inner_name]
            raise ConfigurationError(
                f"'{_KEY}' matches {name}, but \"{setting}\" collects what {inner_name} computes, "
                f'which would have no gradient: write "{setting}": false, or choose modules '
                "without it."
            )
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd) and inner.p > 0:
            raise ConfigurationError(
                f"'{_KEY}' matches {name}, but {inner_name} is dropout, which recomputation would "
                "change: set it to 0, or choose modules without dropout."
            )
        if isinstance(inner, torch.nn.modules.batchnorm._NormBase):
            raise ConfigurationError(
                f"'{_KEY}' matches {name}, but {inner_name} normalizes over all positions: choose "
                "modules that compute each position by itself."
            )


@contextmanager
def _tile_forward(
    module: torch.nn.Module, name: str, num_tiles: int, zero_stage: int
) -> Iterator[None]:
    # At stage 3 they must stay gathered for all tiles, until the gradients of all are computed.
    gathered = list(module.parameters()) if zero_stage == 3 else []
    for parameter in gathered:
        register_external_parameter(module, parameter)
    module.forward = _TiledForward(  # type: ignore[method-assign,assignment]
        module, name, module.forward, num_tiles
    )
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        for parameter in gathered:
            unregister_external_parameter(module, parameter)


class _TiledForward:
    """Replacement of a module's `forward`."""

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        forward: Callable[[torch.Tensor], torch.Tensor],
        num_tiles: int,
    ) -> None:
        self._module = module
        self._name = name
        self._forward = forward
        self._num_tiles = num_tiles
        # In training mode, in evaluation mode.
        self._checked: Set[bool] = set()
        self._has_own_graph = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].dim() < 3:
            raise ConfigurationError(
                f"'{_KEY}' matches {self._name}, which takes more than one tensor of shape "
                "(batch_size, length, ...): choose modules that compute each position by itself."
            )
        hidden: torch.Tensor = args[0]
        if self._module.training not in self._checked and hidden.size(1) > 1:
            self._check(hidden)
            self._checked.add(self._module.training)
        if not torch.is_grad_enabled():
            return _run_in_tiles(self._forward, hidden, self._num_tiles)
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        return _TiledFunction.apply(
            self._forward_and_check, self._num_tiles, current_autocast(), hidden, *parameters
        )

    def _forward_and_check(self, tile: torch.Tensor) -> torch.Tensor:
        """
        Checks the first graph: the gradients that a backward pass computes for the tiles are those
        of the module's parameters and of its input.
        """
        output = self._forward(tile)
        if torch.is_grad_enabled() and not self._has_own_graph:
            own = {id(tile), *map(id, self._module.parameters())}
            if any(id(leaf) not in own for leaf in _leaves(output)):
                raise ConfigurationError(
                    f"'{_KEY}' matches {self._name}, which computes with a tensor that needs a "
                    "gradient, but is neither its input nor one of its parameters: pass it on "
                    "within a module that isn't tiled, or choose other modules."
                )
            self._check_attributes(tile)
            self._has_own_graph = True
        return output

    def _check_attributes(self, tile: torch.Tensor) -> None:
        """Checks that no loss can be made of what the module has computed, but for its output."""
        for module_name, module in self._module.named_modules(prefix=self._name):
            for attribute, value in vars(module).items():
                values = value if isinstance(value, (list, tuple)) else [value]
                tensors = [v for v in values if isinstance(v, torch.Tensor)]
                if any(leaf is tile for tensor in tensors for leaf in _leaves(tensor)):
                    raise ConfigurationError(
                        f"'{_KEY}' matches {self._name}, but {module_name}.{attribute} keeps what "
                        "is computed from a tile, which would have no gradient: detach it, or "
                        "choose other modules."
                    )

    def _check(self, hidden: torch.Tensor) -> None:
        """
        Checks that some positions have the same outputs together as alone, and when recomputed.
        """
        positions = hidden[:, :_CHECKED].detach().clone()
        version = positions._version
        with torch.no_grad():
            together = self._forward(positions)
            if positions._version != version:
                raise ConfigurationError(
                    f"'{_KEY}' matches {self._name}, which changes its input in place, but gets "
                    "copies of its tiles: change a copy in it, or choose other modules."
                )
            is_one_each = (
                isinstance(together, torch.Tensor) and together.shape[:2] == positions.shape[:2]
            )
            alone = (
                _run_in_tiles(self._forward, positions, positions.size(1)) if is_one_each else None
            )
        if alone is None or not torch.allclose(together, alone, rtol=1e-2, atol=1e-3):
            raise ConfigurationError(
                f"'{_KEY}' matches {self._name}, whose output depends on other positions: choose "
                "modules that compute each position by itself, without dropout."
            )


def _leaves(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors to whose `grad` a backward pass of the output would add."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _run_in_tiles(
    forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, num_tiles: int
) -> torch.Tensor:
    return torch.cat([forward(tile) for tile in _tiles(hidden, num_tiles)], dim=1)


def _tiles(hidden: torch.Tensor, num_tiles: int) -> Iterator[torch.Tensor]:
    """Splits the positions into the same number of tiles, also if there are fewer positions."""
    # Contiguous, because some layers, such as GPT-2's, call `view` on them.
    return (tile.contiguous() for tile in hidden.tensor_split(num_tiles, dim=1))


class _TiledFunction(torch.autograd.Function):
    """
    Autograd function with a forward pass without a graph, and a backward pass that recomputes tile
    by tile. It adds up the gradients of parameters over the tiles and returns them once, so that
    gradient reduction doesn't see the tiles.
    """

    @staticmethod
    @override
    def forward(  # type: ignore[override]
        ctx: Any,
        forward: Callable[[torch.Tensor], torch.Tensor],
        num_tiles: int,
        autocast: Callable[[], ContextManager],
        hidden: torch.Tensor,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.function, ctx.num_tiles, ctx.autocast = forward, num_tiles, autocast
        ctx.parameters = parameters
        ctx.save_for_backward(hidden)
        return _run_in_tiles(forward, hidden, num_tiles)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        num_tiles, parameters = ctx.num_tiles, ctx.parameters
        of_hidden: List[torch.Tensor] = []
        totals: List[Any] = [None] * len(parameters)
        tiles = zip(_tiles(hidden, num_tiles), _tiles(gradient, num_tiles))
        for tile, of_output in tiles:
            tile = tile.detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast():
                output = ctx.function(tile)
            own, *others = torch.autograd.grad(
                output, [tile, *parameters], of_output, allow_unused=True
            )
            of_hidden.append(torch.zeros_like(tile) if own is None else own)
            for i, other in enumerate(others):
                if other is not None:
                    # Summing many tiles in bf16 would lose digits.
                    other = other.to(torch.promote_types(other.dtype, torch.float32))
                    totals[i] = other if totals[i] is None else totals[i].add_(other)
        of_parameters = [None if t is None else t.to(p.dtype) for t, p in zip(totals, parameters)]
        needs_hidden = ctx.needs_input_grad[3]
        return (None, None, None, torch.cat(of_hidden, 1) if needs_hidden else None, *of_parameters)
