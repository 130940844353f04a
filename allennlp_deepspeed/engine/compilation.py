"""
Has `torch.compile` compile what a model computes, inside the engine and in the place where the
model keeps its own forward pass: names of parameters and modules stay as they are.
"""

import logging
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, Callable, Dict, Iterator, List, Set, Type
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.metrics import Metric

from allennlp_deepspeed.config.torch_compile_settings import DEFAULT_BACKEND, KEY
from allennlp_deepspeed.deepspeed_api import z3_leaf_module
from allennlp_deepspeed.engine.activation_checkpointing import is_recomputed

logger = logging.getLogger(__name__)


class Compiler:
    """
    Compiles functions, each once.

    # Parameters

    settings : `Dict[str, Any]`, required.
        Arguments of `torch.compile`, as `torch_compile_settings` returns them.
    """

    def __init__(self, settings: Dict[str, Any]) -> None:
        self._settings = settings
        self._compiled: Dict[Callable, Callable] = {}

    def compiled(self, function: Callable) -> Callable:
        """Returns the same function, compiled when it is first called."""
        if function not in self._compiled:
            self._compiled[function] = torch.compile(_with_own_code(function), **self._settings)
        return self._compiled[function]

    @contextmanager
    def around(self, model: torch.nn.Module) -> Iterator[None]:
        """
        Within it what is compiled computes as it does without. To be entered before the model is
        called, and left when it isn't any more.

        Metrics stay outside of what is compiled. They count in Python's numbers, of which each
        would be a constant to the compiler, and reduce over the ranks. So does what a backward pass
        computes again, which has to save the same tensors both times. Random numbers, as for
        dropout, are those that PyTorch draws without compiling.

        # Parameters

        model : `torch.nn.Module`, required.
        """
        with ExitStack() as undo:
            for metric_class in _metric_classes(model):
                call: Any = metric_class.__call__
                outside = torch.compiler.disable(call)
                undo.enter_context(mock.patch.object(metric_class, "__call__", outside))
            for module in filter(is_recomputed, model.modules()):
                outside = torch.compiler.disable(module.forward)
                undo.enter_context(mock.patch.object(module, "forward", outside))
            if self._settings["backend"] == DEFAULT_BACKEND:
                from torch._inductor import config  # slow to import

                undo.enter_context(config.patch(fallback_random=True))
            yield

    @contextmanager
    def leaf_modules(self, model: torch.nn.Module) -> Iterator[None]:
        """
        Within it the modules of `model` are compiled whose parameters ZeRO stage 3 gathers as one,
        before their forward pass begins: there is no other place for a graph, because what gathers
        can't be part of one.

        # Parameters

        model : `torch.nn.Module`, required.
            With an engine around it.

        # Raises

        `ConfigurationError`
            If there are none.
        """
        modules = _leaf_modules(model)
        if not modules:
            raise ConfigurationError(
                f"'{KEY}' is given, but nothing can be compiled: at ZeRO stage 3 it is the modules "
                "in deepspeed_config.zero_optimization.leaf_module, and the model has none but "
                "those whose activations are checkpointed. Name others there, or remove the key."
            )
        logger.info("Compiled are %s", ", ".join(modules))
        with ExitStack() as undo:
            for module in modules.values():
                forward = self.compiled(module.forward)
                undo.enter_context(mock.patch.object(module, "forward", forward))
            yield


def _leaf_modules(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    """The outermost ones by name, without what a backward pass computes again."""
    found: Dict[str, torch.nn.Module] = {}
    recomputed: List[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in [*found, *recomputed]):
            continue
        if is_recomputed(module):
            recomputed.append(name)
        elif z3_leaf_module(module):
            found[name] = module
    return found


def _with_own_code(function: Callable) -> Callable:
    """
    A function that calls another, with code of its own. PyTorch keeps what it has compiled with the
    code, and gives up when it has compiled the same for the eighth time: the layers of a
    transformer, and the models of a process, are not to count as one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code: CodeType = call.__code__.replace()
    return FunctionType(code, call.__globals__, "forward", None, call.__closure__)


def _metric_classes(model: torch.nn.Module) -> Set[Type[Metric]]:
    classes: Set[Type[Metric]] = set()
    for module in model.modules():
        for value in vars(module).values():
            values = [value]
            if isinstance(value, dict):
                values = list(value.values())
            elif isinstance(value, (list, tuple)):
                values = list(value)
            classes.update(type(each) for each in values if isinstance(each, Metric))
    return classes
