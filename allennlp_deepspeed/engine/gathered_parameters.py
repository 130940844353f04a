"""
Parameters that ZeRO stage 3 shards, where one step makes several passes through the model.
"""

from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Hashable, Iterator, List, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedEngine,
    GatheredParameters,
    PartitionedParameterCoordinator,
)
from allennlp_deepspeed.engine import internals


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

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        # Not what wraps it at other stages.
        self._offload = getattr(engine.optimizer, "parameter_offload", None)
        self._coordinators: Dict[Hashable, PartitionedParameterCoordinator] = {}

    def of(self, *kind: Hashable) -> ContextManager[None]:
        """
        Surrounds a forward pass, with its backward pass if it has one, of a kind whose passes use
        the same parameters in the same order. To be entered by every rank.
        """
        return nullcontext() if self._offload is None else self._of_sharded(kind)

    @contextmanager
    def _of_sharded(self, kind: Tuple[Hashable, ...]) -> Iterator[None]:
        offload: Any = self._offload
        if kind not in self._coordinators:
            self._coordinators[kind] = internals.new_coordinator(offload)
        others, offload.param_coordinator = offload.param_coordinator, self._coordinators[kind]
        try:
            yield
        finally:
            offload.param_coordinator = others


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


def end_passes(engine: DeepSpeedEngine) -> None:
    """
    Has nothing use the parameters any more, where an exception has ended a pass. Not a collective.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        At stage 3.
    """
    in_flight = engine.module.ds_inflight_param_registry
    for parameter in filter(internals.is_sharded, engine.module.parameters()):
        if parameter in in_flight:
            in_flight.pop(parameter).wait()
        parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]


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
