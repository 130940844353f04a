"""
What AllenNLP's own code gives to the constructors that it calls, beside the keys of the config.
"""

from typing import Any, Dict, FrozenSet, NamedTuple

from allennlp_deepspeed.signatures.annotations import kind


class Given(NamedTuple):
    """
    # Parameters

    names : `FrozenSet[str]`
        Of arguments that are given. What is constructed inside is given them as well.
    is_open : `bool`, optional (default = `False`)
        Whether there may be others, because a class constructs its parts itself.
    """

    names: FrozenSet[str] = frozenset()
    is_open: bool = False

    def and_(self, *names: str) -> "Given":
        return self._replace(names=self.names | set(names))


def given_to(given: Given, constructor: Any, name: str, annotation: Any) -> Given:
    """
    # Parameters

    given : `Given`, required.
        To a constructor.
    constructor : `Any`, required.
    name : `str`, required.
        Of one of its arguments.
    annotation : `Any`, required.

    # Returns

    `Given`
        To what is constructed for the argument.
    """
    known = _BY_CONSTRUCTOR.get(getattr(constructor, "__name__", ""), {}).get(name)
    is_known = known is not None and is_own_code(constructor)
    is_open = given.is_open or (not is_known and _has_lazy(annotation))
    return given.and_(*known or ())._replace(is_open=is_open)


def is_own_code(thing: Any) -> bool:
    """Whether a class or a function is AllenNLP's or this package's."""
    return thing.__module__.startswith(("allennlp.", "allennlp_deepspeed."))


def _has_lazy(annotation: Any) -> bool:
    args = getattr(annotation, "__args__", ())
    return kind(annotation) == "lazy" or any(map(_has_lazy, args))


# Of the train loop and the trainer. A class of the user's that has a constructor of the same name
# gives the same, and maybe more.
_BY_CONSTRUCTOR: Dict[str, Dict[str, Any]] = {
    "from_partial_objects": {
        "dataset_reader": (),  # lazy in ours
        "validation_dataset_reader": (),
        "data_loader": ("reader", "data_path"),
        "validation_data_loader": ("reader", "data_path"),
        "vocabulary": ("instances",),
        "model": ("vocab", "serialization_dir", "ddp_accelerator"),
        "trainer": (
            "serialization_dir",
            "model",
            "data_loader",
            "validation_data_loader",
            "local_rank",
            "ddp_accelerator",
        ),
        "optimizer": ("model_parameters",),
        "learning_rate_scheduler": ("optimizer", "num_epochs", "num_steps_per_epoch"),
        "momentum_scheduler": ("optimizer",),
        "moving_average": ("parameters",),
        "checkpointer": ("serialization_dir",),
        "callbacks": ("serialization_dir",),
    },
}
