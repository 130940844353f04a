"""
Counts what crosses the network.
"""

import itertools
import re
from collections import defaultdict
from typing import Any, Dict, List, NamedTuple, Optional, Set

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

_HOOK_IDS = itertools.count(2**32)  # of a process group's hooks; far from those of others

# What PyTorch's hooks call otherwise than its functions.
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class Traffic(NamedTuple):
    """
    What one rank has sent or received through one kind of collective.

    `bytes` are those of the tensors that it has passed, of the inputs or the outputs, whichever are
    more: for an all-gather the whole of what was gathered, for a reduce-scatter the whole of what
    was reduced, and for the others the tensor itself. How often a byte crosses a wire is the
    backend's choice.
    """

    calls: int
    bytes: int


class CommunicationCounter:
    """
    Counts this rank's collectives and their bytes, whoever calls them: DeepSpeed, the model's
    metrics, or the reducer of `DistributedDataParallel` in C++. It counts from `start` to `stop`,
    or as a context manager, and makes no collective of its own.

    # Raises

    `ConfigurationError`
        From `start`, with a PyTorch whose process groups have no hooks.
    """

    def __init__(self) -> None:
        self._hook_id = next(_HOOK_IDS)
        self._groups: List[dist.ProcessGroup] = []
        self._traffic: Dict[str, List[int]] = defaultdict(lambda: [0, 0])

    def start(self) -> None:
        """Starts counting, in every process group that this rank is in now."""
        self._groups = list(process_groups())
        for group in self._groups:
            if not hasattr(group, "register_pre_hook"):
                raise ConfigurationError(
                    f"Collectives can't be counted with PyTorch {torch.__version__}, whose process "
                    "groups have no hooks. Install a newer one, or leave out what counts."
                )
            suffix = "" if group.size() == dist.get_world_size() else f"_{group.size()}_ranks"
            group.register_pre_hook(self._hook_id, _Count(self._traffic, suffix))

    def stop(self) -> None:
        for group in self._groups:
            group.unregister_pre_hook(self._hook_id)
        self._groups = []

    def __enter__(self) -> "CommunicationCounter":
        self.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.stop()

    def read(self, reset: bool = False) -> Dict[str, Traffic]:
        """
        The traffic so far by the collective's name, such as `"all_reduce"`, with the number of
        ranks behind it where these aren't all: `"all_gather_2_ranks"`.

        # Parameters

        reset : `bool`, optional (default = `False`)
            Whether to begin again with nothing.
        """
        traffic = {name: Traffic(*counts) for name, counts in sorted(self._traffic.items())}
        if reset:
            self._traffic.clear()
        return traffic


class _Count:
    def __init__(self, traffic: Dict[str, List[int]], suffix: str) -> None:
        self._traffic = traffic
        self._suffix = suffix

    def __call__(self, args: Any) -> None:
        # Since 2.15 hooks tell variants apart, such as "allgather_base".
        name = re.sub("(_into)?(_tensor)?_(base|coalesced)$", "", args.name.name.lower())
        counts = self._traffic[_NAMES.get(name, name) + self._suffix]
        counts[0] += 1
        counts[1] += max(num_bytes(args.input_tensors), num_bytes(args.output_tensors))


def num_bytes(tensors: Optional[List[torch.Tensor]]) -> int:
    """Of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors or [])


def process_groups() -> Set[dist.ProcessGroup]:
    """All that this rank is in."""
    # PyTorch has no public list of them.
    return set(dist.distributed_c10d._world.pg_map)
