"""The orders in which passes at ZeRO stage 3 prefetch parameters."""

from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Hashable, Iterator, List, Tuple

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, PartitionedParameterCoordinator
from allennlp_deepspeed.engine import internals

# Each `DeepSpeedZeRoOffload` whose coordinator is replaced, the innermost last. Global, because a
# model that runs an `untraced_pass` doesn't know its engine.
_offloads_in_use: List[Any] = []


class PrefetchTraces:
    """
    Prefetch orders of a model with sharded parameters, one for each kind of pass. It does nothing
    at stages other than 3.

    DeepSpeed records the order in which a pass uses the parameters, to prefetch them, and restarts
    the recording when a pass uses them in another order: this costs a few small collectives in each
    pass, and nothing is prefetched. Here passes of each kind have their own order. With gradient
    caching, a pass without a graph, one with a graph and that of the loss follow one another in
    every step, and validation follows training.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        # Optimizers of other stages don't have it.
        self._offload = getattr(engine.optimizer, "parameter_offload", None)
        self._coordinators: Dict[Hashable, PartitionedParameterCoordinator] = {}

    def use(self, *kind: Hashable) -> ContextManager[None]:
        """
        Context manager for a forward pass, with its backward pass if it has one, of a kind whose
        passes use the same parameters in the same order. Every rank must enter it.
        """
        return nullcontext() if self._offload is None else self._use_trace(kind)

    @contextmanager
    def _use_trace(self, kind: Tuple[Hashable, ...]) -> Iterator[None]:
        offload: Any = self._offload
        if kind not in self._coordinators:
            self._coordinators[kind] = internals.new_coordinator(offload)
        with _use_coordinator(offload, self._coordinators[kind]):
            yield


def untraced_pass() -> ContextManager[None]:
    """
    Context manager for forward passes that a model runs once, within another, such as to check
    something. They aren't recorded in the prefetch order of the other pass. It does nothing outside
    of training at stage 3, or when the order has been recorded. Every rank must enter it, because
    DeepSpeed compares the orders of the ranks.
    """
    offload = _offloads_in_use[-1] if _offloads_in_use else None
    # What a complete order has already prefetched, the other pass could release.
    if offload is None or offload.param_coordinator.is_complete_trace():
        return nullcontext()
    return _use_coordinator(offload, internals.new_coordinator(offload))


@contextmanager
def _use_coordinator(offload: Any, coordinator: PartitionedParameterCoordinator) -> Iterator[None]:
    previous, offload.param_coordinator = offload.param_coordinator, coordinator
    _offloads_in_use.append(offload)
    try:
        yield
    finally:
        _offloads_in_use.pop()
        offload.param_coordinator = previous
