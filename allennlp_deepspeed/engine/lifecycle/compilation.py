"""
Compiles the forward pass of a model with `torch.compile`, inside the engine and in place, so that
names of parameters and modules don't change.
"""

import logging
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, Callable, Dict, Iterator, List, Set, Type
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.metrics import Metric

from allennlp_deepspeed.config.structured_keys import DEFAULT_BACKEND, TORCH_COMPILE
from allennlp_deepspeed.deepspeed_api import z3_leaf_module
from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import is_recomputed

logger = logging.getLogger(__name__)


class Compiler:
    """
    Compiles functions, each of them once.

    # Parameters

    settings : `Dict[str, Any]`, required.
        Arguments of `torch.compile`, as `torch_compile_settings` returns them.
    """

    def __init__(self, settings: Dict[str, Any]) -> None:
        self._settings = settings
        self._compiled: Dict[Callable, Callable] = {}

    def compile(self, function: Callable) -> Callable:
        """Returns the function, compiled when it is first called."""
        if function not in self._compiled:
            self._compiled[function] = torch.compile(_with_own_code(function), **self._settings)
        return self._compiled[function]

    @contextmanager
    def exclude_uncompilable(self, model: torch.nn.Module) -> Iterator[None]:
        """
        Context manager in which compiled functions compute the same as uncompiled ones. It must
        surround all calls of the model.

        Metrics are excluded from compilation. They count in Python numbers, each of which would be
        a constant for the compiler, and reduce over the ranks. Activation-checkpointed modules are
        excluded too, because they must save the same tensors when recomputed. Random numbers, as
        for dropout, are those of uncompiled PyTorch.

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
            from torch._dynamo import config  # slow to import, as the other one

            # Otherwise PyTorch's generator draws what a model draws from NumPy's.
            undo.enter_context(config.patch(use_numpy_random_stream=True))
            if self._settings["backend"] == DEFAULT_BACKEND:
                from torch._inductor import config as inductor_config

                undo.enter_context(inductor_config.patch(fallback_random=True))
            yield

    @contextmanager
    def compile_leaf_modules(self, model: torch.nn.Module) -> Iterator[None]:
        """
        Context manager that compiles the leaf modules of `model`, whose parameters ZeRO stage 3
        gathers together before their forward pass. No other graph is possible, because the hooks
        that gather can't be part of one.

        # Parameters

        model : `torch.nn.Module`, required.
            A model that is wrapped in an engine.

        # Raises

        `ConfigurationError`
            If the model has no leaf modules to compile.
        """
        modules = _leaf_modules(model)
        if not modules:
            raise ConfigurationError(
                f"'{TORCH_COMPILE}' is set, but there is nothing to compile: at ZeRO stage 3 these "
                "are the modules in 'trainer.deepspeed_config.zero_optimization.leaf_module', and "
                "the model has none, except modules with activation checkpointing. Add classes to "
                f"'leaf_module', or remove '{TORCH_COMPILE}'."
            )
        logger.info("Compiled: %s", ", ".join(modules))
        with ExitStack() as undo:
            for module in modules.values():
                forward = self.compile(module.forward)
                undo.enter_context(mock.patch.object(module, "forward", forward))
            yield


@contextmanager
def explain_errors_at_stage_3(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that adds to an error of PyTorch's compiler what compiled code can't do at ZeRO
    stage 3, if the model has compiled methods or modules of its own.

    # Raises

    `RuntimeError`
        With their names.
    """
    try:
        yield
    except Exception as error:
        is_of_compiler = any(c.__module__ == "torch._dynamo.exc" for c in type(error).__mro__)
        names = _compiled_by_itself(model) if is_of_compiler else []
        if not names:
            raise
        raise RuntimeError(
            f"The model compiles {', '.join(map(repr, names))} by `torch.compile`, which failed at "
            "ZeRO stage 3. Hooks gather the parameters of a module when it is called: call modules "
            "in compiled code instead of reading their weights, and don't compile with "
            "`fullgraph`. Or remove `torch.compile` from the model, and write "
            f"'{TORCH_COMPILE}' with the modules to compile in "
            "'trainer.deepspeed_config.zero_optimization.leaf_module'."
        ) from error


def _compiled_by_itself(model: torch.nn.Module) -> List[str]:
    """Returns the names of the methods and modules that the model has compiled."""
    names: List[str] = []
    for name, module in model.named_modules():
        owners = [*type(module).__mro__, module]
        attributes = {key: value for owner in owners for key, value in vars(owner).items()}
        for key, value in attributes.items():
            added = getattr(value, "__dict__", {})
            if "_torchdynamo_orig_callable" in added and "_torchdynamo_disable" not in added:
                # A module compiled in place has this one.
                names.append(name if key == "_compiled_call_impl" else f"{name}.{key}".lstrip("."))
    return names


def _leaf_modules(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    """Returns the outermost leaf modules by name, without activation-checkpointed ones."""
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
    """Wraps a function in one with its own code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # PyTorch caches compiled code by code object, and gives up at the eighth compilation of one:
    # the layers of a transformer, and the models of a process, must not count as one.
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
