from typing import Iterator, Optional

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import DataLoader, TensorDict

from allennlp_deepspeed.processes import agreement


class EvenBatches:
    """
    Batches for a validation that leaves nothing out: a rank with fewer than others repeats its last
    one, for a model whose metrics count each example once (`validates_whole_set`). To be iterated
    over by every rank.

    # Parameters

    data_loader : `DataLoader`, required.
    device : `torch.device`, required.
        Where the process group communicates.

    # Raises

    `ConfigurationError`
        On every rank, if one has no batch at all.
    """

    def __init__(self, data_loader: DataLoader, device: torch.device) -> None:
        self.data_loader = data_loader
        self._device = device

    def __len__(self) -> int:
        return len(self.data_loader)

    def __iter__(self) -> Iterator[TensorDict]:
        batches = iter(self.data_loader)
        last: Optional[TensorDict] = None
        while True:
            batch = next(batches, None)
            last = last if batch is None else batch
            num_with_batch, num_without_any = agreement.total(
                [int(batch is not None), int(last is None)], self._device
            )
            if num_with_batch == 0:
                return
            if num_without_any > 0 or last is None:
                raise ConfigurationError(
                    "A worker has no validation data: use fewer workers, or put more instances "
                    "into 'validation_data_path'."
                )
            yield last
