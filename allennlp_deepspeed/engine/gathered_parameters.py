"""
Parameters that ZeRO stage 3 shards, where one step makes several passes through the model.
"""

from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Hashable, Iterable, Iterator, List, Tuple
from unittest import mock

import torch
from deepspeed.runtime.zero import parameter_offload

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedEngine,
    GatheredParameters,
    PartitionedParameterCoordinator,
    iter_params,
    z3_leaf_module,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.module_hooks import without_backward_functions

# Of which a layer that is left out at random makes many.
MAX_KINDS = 32


class _Keeper:
    """
    Among the numbers of the modules that use a parameter. While there is one, DeepSpeed doesn't
    release the parameter.
    """


class Passes:
    """
    Tells DeepSpeed what is a pass through a model whose parameters it shards. At stages other than
    3 this does nothing.

    DeepSpeed records in which order a pass uses the parameters, to gather them in time, and begins
    anew as soon as one uses them otherwise: with a few small collectives in each pass, and nothing
    gathered in time. Here passes of each kind have an order of their own. A pass without a graph,
    another with one and that of the loss follow one another in every step with gradient caching,
    and validation follows training.

    Before and after each module DeepSpeed looks for what there is to gather and to release. A pass
    leaves modules to themselves whose parameters, with those of the modules in them, are all whole:
    they have none, small ones, or such that are `kept_gathered`. Until the pass ends they stay so.
    For a small module it takes longer to look than to compute.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        # Not what wraps it at other stages.
        self._offload = getattr(engine.optimizer, "parameter_offload", None)
        self._modules: List[Any] = [m for m in engine.module.modules() if "ds_id" in vars(m)]
        self._coordinators: OrderedDict[Hashable, PartitionedParameterCoordinator] = OrderedDict()

    def of(self, *kind: Hashable) -> ContextManager[None]:
        """
        Surrounds a forward pass, with its backward pass if it has one, of a kind whose passes use
        the same parameters in the same order. To be entered by every rank.
        """
        return nullcontext() if self._offload is None else self._of_sharded(kind)

    @contextmanager
    def _of_sharded(self, kind: Tuple[Hashable, ...]) -> Iterator[None]:
        whole = self._whole_modules()
        parameters = {p: None for module in whole.values() for p in _parameters(module)}
        with (
            self._recorded_as((*kind, *whole)),
            self._left_out(whole),
            kept_gathered(list(parameters)),
            kept_by_readers(),
        ):
            yield

    def _whole_modules(self) -> Dict[int, torch.nn.Module]:
        """
        By DeepSpeed's numbers. One that has another in it is found by DeepSpeed in the backward
        pass, when activations are computed again, to release what the other's gathers for that.
        """
        found: Dict[int, torch.nn.Module] = {}
        for module in reversed(self._modules):  # so that those in it come before
            inner = () if z3_leaf_module(module) else module.children()
            if all(getattr(child, "ds_id", None) in found for child in inner) and all(
                map(_stays_whole, _parameters(module))
            ):
                found[module.ds_id] = module
        return found

    @contextmanager
    def _recorded_as(self, kind: Hashable) -> Iterator[None]:
        offload: Any = self._offload
        if kind not in self._coordinators:
            self._coordinators[kind] = internals.new_coordinator(offload)
            if len(self._coordinators) > MAX_KINDS:
                self._coordinators.popitem(last=False)
        self._coordinators.move_to_end(kind)
        others, offload.param_coordinator = offload.param_coordinator, self._coordinators[kind]
        try:
            yield
        finally:
            offload.param_coordinator = others

    @contextmanager
    def _left_out(self, modules: Dict[int, torch.nn.Module]) -> Iterator[None]:
        offload: Any = self._offload
        gather: Any = offload.pre_sub_module_forward_function
        release: Any = offload.post_sub_module_forward_function

        def before(module: Any) -> None:
            if module.ds_id in modules:
                # From which DeepSpeed takes it afterwards.
                parameter_offload.FWD_MODULE_STACK.append(module)
            else:
                gather(module)

        def after(module: Any) -> None:
            if module.ds_id not in modules:
                release(module)

        with (
            mock.patch.object(offload, "pre_sub_module_forward_function", before),
            mock.patch.object(offload, "post_sub_module_forward_function", after),
            without_backward_functions(modules.values()),
        ):
            yield


def _parameters(module: Any) -> Iterable[Any]:
    """Those for which DeepSpeed looks at the module: its own, and what it reads of others."""
    return iter_params(module, recurse=z3_leaf_module(module))


def _stays_whole(parameter: Any) -> bool:
    return (
        internals.is_sharded(parameter)
        and internals.is_gathered(parameter)
        and (parameter.ds_persist or _is_kept(parameter))
    )


def _is_kept(parameter: Any) -> bool:
    return any(isinstance(user, _Keeper) for user in parameter.ds_active_sub_modules)


@contextmanager
def kept_by_readers() -> Iterator[None]:
    """
    Within it `GatheredParameters`, in which a model can read and write parameters on its way,
    doesn't fail on letting go of those that are kept.
    """
    to_partition, partition = internals.release_functions_of_readers().values()

    def not_kept(gathered: GatheredParameters) -> List[Any]:
        parameters = to_partition(gathered)
        is_read = gathered.src_rank is None
        return [p for p in parameters if not (is_read and _is_kept(p))]

    def partition_and_gather(parameters: List[Any], has_been_updated: bool) -> None:
        # What one rank may have changed is partitioned, or the change would be lost.
        kept = list(filter(_is_kept, parameters))
        keepers = [{u for u in p.ds_active_sub_modules if isinstance(u, _Keeper)} for p in kept]
        for parameter, of_parameter in zip(kept, keepers):
            parameter.ds_active_sub_modules -= of_parameter
        partition(parameters, has_been_updated)
        if kept:
            kept[0].all_gather(param_list=kept)
        for parameter, of_parameter in zip(kept, keepers):
            parameter.ds_active_sub_modules |= of_parameter

    with internals.replaced(
        GatheredParameters,
        _params_to_partition=not_kept,
        _partition_params=staticmethod(partition_and_gather),
    ):
        yield


@contextmanager
def kept_gathered(parameters: List[torch.nn.Parameter]) -> Iterator[None]:
    """
    A context in which these parameters stay whole on every rank once a pass has gathered them. To
    be entered by every rank with the same parameters, and left before the optimizer steps. Within
    another one they stay until that is left too.

    # Parameters

    parameters : `List[torch.nn.Parameter]`, required.
        Of an engine at stage 3.
    """
    sharded: List[Any] = list(parameters)
    keeper = _Keeper()
    for parameter in sharded:
        parameter.ds_active_sub_modules.add(keeper)
    try:
        yield
    finally:
        for parameter in sharded:
            users = parameter.ds_active_sub_modules
            users.discard(keeper)
            is_whole = internals.is_gathered(parameter)
            if is_whole and not users and not parameter.ds_persist:
                parameter.partition()


def all_that_are_sharded(engine: DeepSpeedEngine) -> List[torch.nn.Parameter]:
    """
    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Returns

    `List[torch.nn.Parameter]`
        Parameters for `kept_gathered`, none at stages other than 3.
    """
    parameters: List[Any] = list(engine.module.parameters())
    return [p for p in parameters if hasattr(p, "ds_status") and not p.ds_persist]
