"""ZeRO stage 3 parameters that stay gathered over several passes."""

from contextlib import contextmanager
from typing import Any, Iterator, List

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, GatheredParameters
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.zero3.gather_order import wait_for_writes


class _Deferral:
    """
    Marker among the ids of the modules that use a parameter. DeepSpeed doesn't release a parameter
    that has one.
    """


def _is_deferred(parameter: Any) -> bool:
    return any(isinstance(user, _Deferral) for user in internals.active_modules(parameter))


@contextmanager
def patch_gathered_parameters() -> Iterator[None]:
    """
    Context manager in which `GatheredParameters`, with which a model can read and write parameters
    in its forward pass, doesn't raise at its exit for parameters of `defer_resharding`.
    """
    to_partition, partition = internals.release_functions_of_readers().values()

    def not_deferred(gathered: GatheredParameters) -> List[Any]:
        parameters = to_partition(gathered)
        is_read = gathered.src_rank is None
        return [p for p in parameters if not (is_read and _is_deferred(p))]

    def partition_and_gather(parameters: List[Any], has_been_updated: bool) -> None:
        # A change by one rank is partitioned, or it would be lost.
        deferred = list(filter(_is_deferred, parameters))
        users = [internals.active_modules(parameter) for parameter in deferred]
        deferrals = [{user for user in each if isinstance(user, _Deferral)} for each in users]
        for users_of_parameter, deferred_by in zip(users, deferrals):
            users_of_parameter.difference_update(deferred_by)
        partition(parameters, has_been_updated)
        if deferred:
            deferred[0].all_gather(param_list=deferred)
        for users_of_parameter, deferred_by in zip(users, deferrals):
            users_of_parameter.update(deferred_by)

    with internals.replace_attributes(
        GatheredParameters,
        _params_to_partition=not_deferred,
        _partition_params=staticmethod(partition_and_gather),
    ):
        yield


@contextmanager
def defer_resharding(parameters: List[torch.nn.Parameter]) -> Iterator[None]:
    """
    Context manager in which these parameters stay gathered on every rank after a pass has gathered
    them. Every rank must enter it with the same parameters, and exit before the optimizer step. In
    nested contexts they stay gathered until the outer one exits.

    # Parameters

    parameters : `List[torch.nn.Parameter]`, required.
        Parameters of an engine at stage 3.
    """
    sharded: List[Any] = list(parameters)
    deferral = _Deferral()
    for parameter in sharded:
        internals.active_modules(parameter).add(deferral)
    try:
        yield
    finally:
        for parameter in sharded:
            users = internals.active_modules(parameter)
            users.discard(deferral)
            is_full = internals.is_gathered(parameter)
            if is_full and not users and not internals.is_persistent(parameter):
                parameter.partition()


@contextmanager
def gathered(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which all parameters are gathered, and forward passes neither gather nor
    release any: they don't communicate, and ranks may run different ones. Every rank must enter it,
    between steps. Other code may not write weights in it.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3.
    """
    offload: Any = engine.optimizer.parameter_offload
    parameters = list(filter(internals.is_sharded, engine.module.parameters()))
    with (
        defer_resharding(parameters),
        patch_gathered_parameters(),
        internals.without_module_hooks(offload),
    ):
        # One without a recorded order prefetches nothing.
        coordinator = internals.new_coordinator(offload)
        wait_for_writes()
        users = [set(internals.active_modules(parameter)) for parameter in parameters]
        for module in engine.module.modules():
            if "ds_id" in vars(module):  # those in a leaf module have none
                coordinator.fetch_sub_module(module, forward=True)
        for parameter, users_before in zip(parameters, users):
            internals.active_modules(parameter).intersection_update(users_before)
        yield


def clear_active_modules(engine: DeepSpeedEngine) -> None:
    """
    Marks all parameters as unused after an exception has ended a pass. Not a collective.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3.
    """
    in_flight = internals.parameters_in_flight(engine.module)
    for parameter in filter(internals.is_sharded, engine.module.parameters()):
        if parameter in in_flight:
            in_flight.pop(parameter).wait()
        internals.active_modules(parameter).clear()


def sharded_parameters(engine: DeepSpeedEngine) -> List[torch.nn.Parameter]:
    """
    Returns the sharded parameters of an engine.

    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Returns

    `List[torch.nn.Parameter]`
        Parameters for `defer_resharding`, none at stages other than 3.
    """
    parameters: List[Any] = list(engine.module.parameters())
    return [p for p in parameters if internals.is_sharded(p) and not internals.is_persistent(p)]
