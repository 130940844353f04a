"""Divides a global batch into the largest micro-batches that fit into memory."""

import logging
import math
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import DEVICE_SYNC, mark_phase
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.extensions.chunk_size import available_for_activations, find_chunk_size
from allennlp_deepspeed.training import loss_terms
from allennlp_deepspeed.training.batch_groups import BatchGroup
from allennlp_deepspeed.training.callbacks import refuse_backward_callbacks
from allennlp_deepspeed.training.chunking import (
    copy_batch,
    indivisible_inputs,
    num_examples,
    slice_rows,
    split_evenly,
)
from allennlp_deepspeed.training.step_extension import StepContext, StepExtension

logger = logging.getLogger(__name__)

# The maximum factor of lengths up to which the size is extrapolated to longer instances. The memory
# of attention grows with the square of the length.
_MAX_LENGTH_RATIO = 1.25


class SizeSearch(NamedTuple):
    """
    Result of a search for the micro-batch size.

    # Parameters

    size : `int`
        The number of instances of a micro-batch.
    length : `int`
        The number of elements of an instance, with padding, in the batches of the search.
    max_instances : `int`
        The number of instances that the search had.
    """

    size: int
    length: int
    max_instances: int


class AutoMicroBatchSize(StepExtension):
    """
    Divides each worker's share of a global batch into the fewest micro-batches that fit into
    memory, for `"num_gradient_accumulation_steps": "auto"`. Forward passes before the first step
    find the number of instances that fit, as for the chunks of `grad_cache`. They run again before
    a step whose instances are much longer than all before. Every rank must call each of these
    methods.

    Every rank has the same number of micro-batches, of sizes that are as equal as possible, because
    at ZeRO stage 3 all ranks run the same passes. A rank with fewer instances than micro-batches
    repeats its first instance in the last passes, which counts only in the metrics.

    # Parameters

    value : `int`, required.
        The trainer's `global_batch_size`.
    context : `StepContext`, required.
    """

    makes_several_passes = True
    divides_batches = True
    state_name = "micro_batches"

    def __init__(self, value: int, context: StepContext) -> None:
        loss_terms.check(context.model)
        refuse_backward_callbacks(
            context.callbacks,
            "with 'trainer.num_gradient_accumulation_steps' \"auto\" the trainer weights the "
            "losses of micro-batches: remove the callback, or write a number of accumulation "
            "steps.",
        )
        wrapped_model = self._wrapped_model = context.wrapped_model
        self._share: int = wrapped_model.config.engine_config["train_micro_batch_size_per_gpu"]
        self._forward = context.forward
        # Sorted by length, the shortest first.
        self._searches: List[SizeSearch] = []
        # Bytes, before the first step.
        self._available_bytes: Optional[int] = None
        # The last accumulation that was printed.
        self._announced_accumulation: Optional[int] = None

    @mark_phase(DEVICE_SYNC)
    @override
    def divide(self, group: BatchGroup) -> BatchGroup:
        """
        Divides this rank's batch into micro-batches. It runs one all-reduce of 8 bytes, which the
        host waits for, and before some steps forward passes.

        # Parameters

        group : `BatchGroup`, required.
            A group of one batch, this rank's share.

        # Returns

        `BatchGroup`
            The micro-batches.

        # Raises

        `ConfigurationError`
            If an input doesn't have one row for each instance.
        """
        (batch,) = group.micro_batches
        wrong = indivisible_inputs(batch)
        if wrong:
            raise ConfigurationError(
                "'trainer.num_gradient_accumulation_steps' is \"auto\", but the input "
                f"'{wrong[0]}' of the model can't be split, because it doesn't have a row for "
                "each instance: write a number of accumulation steps."
            )
        if self._available_bytes is None:
            self._available_bytes = available_for_activations(self._wrapped_model)
        num_instances = num_examples(batch)
        max_instances, length = collectives.all_reduce_max(
            [num_instances, _length(batch)], self._wrapped_model.engine.device
        )
        size = self._known_size(max_instances, length)
        if size is None:
            size = self._search(batch, max_instances, length)
        num_micro_batches = math.ceil(max_instances / size)
        num_dummy_batches = max(num_micro_batches - num_instances, 0)
        bounds = split_evenly(num_instances, num_micro_batches - num_dummy_batches)
        micro_batches = [slice_rows(batch, start, stop) for start, stop in bounds]
        # Copies, because a model may change its inputs.
        first = slice_rows(batch, 0, 1)
        micro_batches += [copy_batch(first) for _ in range(num_dummy_batches)]
        return BatchGroup(micro_batches, num_micro_batches, num_dummy_batches)

    @override
    def state_dict(self) -> Optional[Dict[str, Any]]:
        """
        Returns the sizes that were found and the setup they are for, or `None` if there are none.
        """
        if not self._searches:
            return None
        return {"found": [list(found) for found in self._searches], "where": self._setup()}

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        """
        Restores the sizes that were found before an interruption. If the world size or the share of
        the batch differs, they are searched again.
        """
        if state_dict is None:
            return
        if state_dict["where"] == self._setup():
            self._searches = [SizeSearch(*found) for found in state_dict["found"]]
            for found in self._searches:
                logger.info("Resumed: the micro-batch size is %d.", found.size)

    def _setup(self) -> List[int]:
        return [dist.get_world_size(), self._share]

    def _known_size(self, max_instances: int, length: int) -> Optional[int]:
        """
        Returns the number of instances of a length that fit, or `None` if it doesn't follow from
        earlier searches.
        """
        for found in self._searches:
            # If all instances fitted, the search had no more to try.
            if length <= found.length and (
                found.size < found.max_instances or max_instances <= found.max_instances
            ):
                return found.size
        if not self._searches:
            return None
        longest = self._searches[-1]
        if longest.size == longest.max_instances or length > _MAX_LENGTH_RATIO * longest.length:
            return None
        return max(1, longest.size * longest.length // length)

    def _search(self, batch: TensorDict, max_instances: int, length: int) -> int:
        num_instances = num_examples(batch)

        def forward(size: int) -> Any:
            return self._forward(copy_batch(slice_rows(batch, 0, min(size, num_instances))))

        size = find_chunk_size(
            "The micro-batch size",
            forward,
            num_instances,
            self._wrapped_model,
            retains_outputs=True,
            available_bytes=self._available_bytes,
        )
        others = [found for found in self._searches if found.length != length]
        self._searches = sorted(
            [*others, SizeSearch(size, length, max_instances)], key=lambda found: found.length
        )
        if dist.get_rank() == 0:
            self._announce(size, is_longest=bool(others) and self._searches[-1].length == length)
        return size

    def _announce(self, size: int, is_longest: bool) -> None:
        num_micro_batches, workers = math.ceil(self._share / size), dist.get_world_size()
        if num_micro_batches == self._announced_accumulation:
            return
        self._announced_accumulation = num_micro_batches
        announce(
            logger,
            "Micro-batch %d × accumulation %d × workers %d = global batch %d, %s",
            math.ceil(self._share / num_micro_batches),
            num_micro_batches,
            workers,
            self._share * workers,
            "for examples as long as now" if is_longest else "from now on",
        )


def _length(batch: Any) -> int:
    """Returns the number of elements of an instance."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors) // num_examples(batch)
