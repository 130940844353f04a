"""
Micro-batches as large as memory takes them, of a global batch.
"""

import logging
import math
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from torch.utils._pytree import tree_leaves, tree_map

from allennlp_deepspeed.checkpoint.module_states import (
    changed_states,
    fingerprints,
    load_module_states,
    module_states,
)
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.gradients.chunk_size import find_chunk_size
from allennlp_deepspeed.gradients.chunking import even_bounds, indivisible, num_examples, rows_of
from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.processes.announcements import announce
from allennlp_deepspeed.processes.phases import HOST_WAITS, during
from allennlp_deepspeed.processes.random_states import random_states, set_random_states
from allennlp_deepspeed.training.batch_groups import BatchGroup

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """
    What the search has found.

    # Parameters

    size : `int`
        Instances of a micro-batch.
    length : `int`
        Numbers that an instance has in the batch in which it was found, with padding. Of longer
        ones there are fewer in a micro-batch.
    most : `int`
        Instances that there were to try.
    """

    size: int
    length: int
    most: int


class MicroBatches:
    """
    Divides each worker's share of a global batch into the fewest micro-batches that fit into
    memory: with `"num_gradient_accumulation_steps": "auto"`. How many instances fit, forward passes
    before the first step find out, as for the chunks of `grad_cache`. Every rank must call each of
    these methods.

    Every rank has as many micro-batches, of sizes that are as equal as can be, because at ZeRO
    stage 3 all make the same passes. One with fewer instances than micro-batches makes the last
    passes with its first instance again, which counts for nothing but the metrics.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    model : `Model`, required.
    forward : `Callable[[TensorDict], Any]`, required.
        A forward pass with a graph.
    around_forward : `Callable[[], ContextManager[None]]`, required.
        Surrounds those that are tried.
    """

    def __init__(
        self,
        wrapped_model: DeepSpeedWrappedModel,
        model: Model,
        forward: Callable[[TensorDict], Any],
        around_forward: Callable[[], ContextManager[None]],
    ) -> None:
        self._engine = wrapped_model.engine
        self._share: int = wrapped_model.config.engine_config["train_micro_batch_size_per_gpu"]
        self._model = model
        self._forward = forward
        self._around_forward = around_forward
        self._found: Optional[Found] = None

    @during(HOST_WAITS)
    def divide(self, group: BatchGroup) -> BatchGroup:
        """
        One all-reduce of 8 bytes, for which the host waits; before the first step, forward passes.

        # Parameters

        group : `BatchGroup`, required.
            With one batch, this rank's share.

        # Returns

        `BatchGroup`
            Its parts.

        # Raises

        `ConfigurationError`
            If there is an input that has no row for each instance.
        """
        (batch,) = group.batches
        wrong = indivisible(batch)
        if wrong:
            raise ConfigurationError(
                "'trainer.num_gradient_accumulation_steps' is \"auto\", but the input "
                f"'{wrong[0]}' of the model has no row for each instance of a batch, so that it "
                "can't be divided: write a number of steps."
            )
        num_instances, length = num_examples(batch), _length(batch)
        if self._found is None:
            self._find(batch)
        most, num_parts = self._agree(num_instances, length)
        if self._found is not None and self._found.size == self._found.most < most:
            # There was no more to try.
            self._find(batch)
            most, num_parts = self._agree(num_instances, length)
        own_parts = min(num_parts, num_instances)
        bounds = even_bounds(num_instances, own_parts) + [(0, 1)] * (num_parts - own_parts)
        parts = [rows_of(batch, start, stop) for start, stop in bounds]
        return BatchGroup(parts, num_parts, num_fillers=num_parts - own_parts)

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """What was found and where, `None` if nothing has been."""
        return None if self._found is None else {**self._found._asdict(), "where": self._where()}

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """
        Takes what was found before an interruption. Where there are other shares of the batch, or
        of the model's states, it is found anew.
        """
        if state is None:
            return
        if state["where"] == self._where():
            self._found = Found(state["size"], state["length"], state["most"])
            logger.info("The micro-batch size is %d, as before.", state["size"])

    def _where(self) -> List[int]:
        return [dist.get_world_size(), self._share]

    def _agree(self, num_instances: int, length: int) -> List[int]:
        """The most instances of any rank, and how many micro-batches all make."""
        assert self._found is not None
        size = self._found.size
        if length > self._found.length:
            size = max(1, size * self._found.length // length)
        parts = math.ceil(num_instances / size)
        return agreement.highest([num_instances, parts], self._engine.device)

    def _find(self, batch: TensorDict) -> None:
        num_instances = num_examples(batch)

        def forward(size: int) -> Any:
            # Copies, because a model may change its inputs.
            return self._forward(_copied(rows_of(batch, 0, min(size, num_instances))))

        with _undone(self._model), self._around_forward():
            size = find_chunk_size(
                "The micro-batch size", forward, num_instances, self._engine, keeps_results=True
            )
        length, most = agreement.highest([_length(batch), num_instances], self._engine.device)
        self._found = Found(size, length, most)
        num_parts = math.ceil(self._share / size)
        workers = dist.get_world_size()
        if dist.get_rank() == 0:
            announce(
                logger,
                "Micro-batch %d × accumulation %d × workers %d = %d instances a step, from here on",
                math.ceil(self._share / num_parts),
                num_parts,
                workers,
                self._share * workers,
            )


@contextmanager
def _undone(model: Model) -> Iterator[None]:
    """Within it forward passes leave metrics, buffers and random states as they were."""
    states, random = module_states(model), random_states()
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer, value in buffers:
        buffer.copy_(value)
        module._buffers[name] = buffer
    load_module_states(model, changed_states(states, fingerprints(module_states(model))))
    set_random_states(random)


def _length(batch: Any) -> int:
    """The numbers of an instance."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors) // num_examples(batch)


def _copied(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
