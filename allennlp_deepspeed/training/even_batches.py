from typing import Any, Iterator, Optional, Protocol, runtime_checkable

from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import DataLoader, TensorDict

from allennlp_deepspeed.training.agreement import Exchange
from allennlp_deepspeed.training.chunking import copy_batch
from allennlp_deepspeed.training_traits import traits_of


@runtime_checkable
class ValidatesWholeSet(Protocol):
    """
    Protocol of models whose validation metrics are those of the data of all ranks together, by the
    trait `validates_whole_set`.
    """

    def dummy_batch(self, batch: TensorDict) -> TensorDict:
        """
        Returns a batch that isn't counted in the metrics, for a rank that has no more data while
        others have.

        # Parameters

        batch : `Dict[str, Any]`, required.
            The last batch of the rank.
        """


class EvenBatches:
    """
    Batches of a validation that leaves no data out: a rank with fewer batches than others continues
    with dummy batches. Every rank must iterate over it.

    # Parameters

    data_loader : `DataLoader`, required.
    model : `ValidatesWholeSet`, required.
    exchange : `Exchange`, required.

    # Raises

    `ConfigurationError`
        On every rank, if a rank has no batch at all.
    """

    def __init__(
        self, data_loader: DataLoader, model: ValidatesWholeSet, exchange: Exchange
    ) -> None:
        self.data_loader = data_loader
        self._model = model
        self._exchange = exchange

    def __len__(self) -> int:
        return len(self.data_loader)

    def __iter__(self) -> Iterator[TensorDict]:
        batches = iter(self.data_loader)
        last: Optional[TensorDict] = None
        while True:
            batch = next(batches, None)
            # A copy, because the model may change the batch.
            last = last if batch is None else copy_batch(batch)
            agreed = self._exchange(has_batch=batch is not None, has_no_data=last is None)
            if not agreed["has_batch"]:
                return
            if agreed["has_no_data"] or last is None:
                raise ConfigurationError(
                    "A worker has no validation data: use fewer workers, or add instances to "
                    "'validation_data_path'."
                )
            yield self._model.dummy_batch(copy_batch(last)) if batch is None else batch


def with_even_batches(data_loader: Any, model: Any, exchange: Exchange) -> Any:
    """
    Returns a data loader for validation by a model that `validates_whole_set`. AllenNLP's loop
    leaves out batches that only some ranks have.

    # Raises

    `ConfigurationError`
        If the model has no `dummy_batch`, or the `filler` of version 0.2.0.
    """
    validates = traits_of(model).validates_whole_set
    if validates and (not isinstance(model, ValidatesWholeSet) or hasattr(model, "filler")):
        raise ConfigurationError(
            f"{type(model).__name__} has 'validates_whole_set', which needs a method "
            "'dummy_batch', called 'filler' in 0.2.0: rename it."
        )
    # Compared with `None`, because its truth is its length, which a lazy loader doesn't have.
    has_data = validates and data_loader is not None
    return EvenBatches(data_loader, model, exchange) if has_data else data_loader
