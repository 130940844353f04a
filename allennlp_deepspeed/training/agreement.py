"""
What the ranks of a training agree on in its steps and epochs. Gradients, weights of losses and
buffers have collectives of their own.
"""

from typing import Any, Callable, Dict, Tuple

import torch

from allennlp_deepspeed.engine.process import collectives

# How the numbers of the ranks, of at most 53 bits, become one: the maxima of their products with
# these signs are taken. Of booleans the largest is whether any is true.
LARGEST = (1,)
SMALLEST = (-1,)
SAME = (1, -1)
# Objects, of which all ranks get a list.
GATHERED = ()

RECORD: Dict[str, Tuple[int, ...]] = {
    # About once a second after a step. The owners take them in this order: the first that raises is
    # the cause of the others.
    "steps_since_nan": LARGEST,
    "non_finite_gradients": LARGEST,
    "changes": LARGEST,  # also at the start of an epoch, and before weights are saved or replaced
    "used_parameters": SAME,
    "signal": LARGEST,  # also before a batch of validation, and before one that is skipped
    "time_to_save": LARGEST,  # by the clock of rank 0
    "seconds_per_step": LARGEST,
    # Before a save.
    "non_finite_weights": LARGEST,
    # At the start of an epoch or a validation.
    "callbacks_read_metrics": LARGEST,
    "metric_names": GATHERED,
    "num_batches": SMALLEST,  # or those of each group, if an epoch's length isn't known
    # In each batch of a validation, if it is read to the end on all ranks or again.
    "has_batch": LARGEST,
    "has_no_data": LARGEST,
    "is_at_end": LARGEST,
    # When metrics are read, and after a validation and an epoch.
    "metric_counts": GATHERED,
    "nan_validation": GATHERED,
    "score": GATHERED,
    "epoch_metrics": GATHERED,
    # Before an error.
    "nan_terms": GATHERED,
    "errors": GATHERED,
}
"""The entries of the record, each with how the values of the ranks are combined."""

AFTER_STEPS = tuple(RECORD)[: tuple(RECORD).index("seconds_per_step") + 1]
"""The entries that the ranks compare after steps."""


Exchange = Callable[..., Dict[str, Any]]
"""`Agreement.exchange`."""


class Agreement:
    """
    Exchanges entries of the `RECORD` between the ranks. An entry may have an owner: it gives this
    rank's value, and takes the one that the ranks have agreed on. If that is an error, the owner
    raises it, the same on every rank.

    # Parameters

    find_device : `Callable[[], torch.device]`, required.
        Returns the device that the process group communicates on.
    """

    def __init__(self, find_device: Callable[[], torch.device]) -> None:
        self._find_device = find_device
        self._owners: Dict[str, Tuple[Callable[[], Any], Callable[[Any], Any]]] = {}

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Agreement":
        # The ranks are the same for a copy of the metric tracker, and the owners are the trainer's.
        return self

    def own(self, name: str, read: Callable[[], Any], take: Callable[[Any], Any]) -> None:
        """
        Adds the owner of an entry.

        # Parameters

        name : `str`, required.
        read : `Callable[[], Any]`, required.
            Returns the value of this rank.
        take : `Callable[[Any], Any]`, required.
            Called with the value that the ranks have agreed on.
        """
        self._owners[name] = (read, take)

    def exchange(self, *names: str, **own: Any) -> Dict[str, Any]:
        """
        Agrees on entries of the record, in one all-reduce, or one all-gather of objects if they are
        gathered, as all of them must be then. Every rank must call it with the same names.

        # Parameters

        names : `str`
            The names of entries with an owner, which take the agreed values in this order.
        own : `Any`
            The values of this rank for other entries, by name.

        # Returns

        `Dict[str, Any]`
            The agreed values by name, of the types of the own ones. Of those that are to be the
            same whether they are.
        """
        values = {name: self._owners[name][0]() for name in names}
        values.update(own)
        agreed: Dict[str, Any] = {}
        if RECORD[next(iter(values))] == GATHERED:
            of_ranks = collectives.all_gather_object(values)
            agreed = {name: [each[name] for each in of_ranks] for name in values}
        else:
            numbers = [float(sign * each) for name, each in values.items() for sign in RECORD[name]]
            maxima = iter(collectives.all_reduce_max(numbers, self._find_device(), torch.float64))
            for name, own_value in values.items():
                first, *second = [sign * next(maxima) for sign in RECORD[name]]
                agreed[name] = [first] == second if second else type(own_value)(first)
        for name in names:
            self._owners[name][1](agreed[name])
        return agreed
