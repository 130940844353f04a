import math
from typing import List

import torch

from allennlp_deepspeed.engine.parameters.shards import Shards


class FiniteWeights:
    """
    Finds NaN or infinity in this rank's elements of the tensors that the optimizer updates, except
    in parameters that began with such a value. It finds none on NVMe.

    # Parameters

    shards : `Shards`, required.
    """

    def __init__(self, shards: Shards) -> None:
        is_in_memory = not shards.engine.zero_nvme_offload_optimizer()
        fragments = shards.fragments if is_in_memory else {}
        self._fragments = [
            fragment
            for parameter, fragment in fragments.items()
            if parameter.requires_grad and fragment.size > 0
            if fragment.in_master(fragment.master.detach()).isfinite().all()
        ]

    def are_finite(self) -> bool:
        """Returns whether they are all finite. It synchronizes with the device."""
        elements: List[torch.Tensor] = [
            fragment.in_master(fragment.master.detach()) for fragment in self._fragments
        ]
        # If all elements are finite, the largest is, but the 2-norm may overflow. It takes a
        # seventh of the time on CPUs.
        norms = (torch.nn.utils.get_total_norm(elements, order) for order in (2.0, math.inf))
        return any(map(math.isfinite, norms))
