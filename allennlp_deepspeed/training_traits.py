"""What a model tells the trainer about its loss and its weights."""

from dataclasses import dataclass, fields
from typing import Any, FrozenSet, Optional

from allennlp.common.checks import ConfigurationError


@dataclass(frozen=True)
class TrainingTraits:
    """
    Traits of a model, in its attribute `training_traits`. Models without it have the defaults.

    # Parameters

    averages_loss_over_tokens : `bool`, optional (default = `False`)
        Whether the trainer weights losses by the model's `num_loss_terms`, its numbers of tokens.
    indivisible_loss : `str`, optional (default = `None`)
        Why the loss of a batch isn't the mean of the losses of its parts, and what to write in the
        config instead, the end of a message. `None` if it is the mean.
    has_loss_of_all_ranks : `bool`, optional (default = `False`)
        Whether the loss is that of the batches of all ranks, dummy ones included.
    computes_in_weights_dtype : `bool`, optional (default = `False`)
        Whether `forward` runs without autocast in bf16 and fp16.
    validates_whole_set : `bool`, optional (default = `False`)
        Whether validation leaves no instance out where workers have different numbers of batches.
        The model's `dummy_batch` completes the batches of the others.
    archived_elsewhere : `FrozenSet[str]`, optional (default = `frozenset()`)
        The names of the frozen parameters that `best.th` and the archive leave out.
    shares_sequences : `bool`, optional (default = `False`)
        Whether the attention of `transformer_to_share` covers the parts of a sequence that other
        ranks have.
    """

    averages_loss_over_tokens: bool = False
    indivisible_loss: Optional[str] = None
    has_loss_of_all_ranks: bool = False
    computes_in_weights_dtype: bool = False
    validates_whole_set: bool = False
    archived_elsewhere: FrozenSet[str] = frozenset()
    shares_sequences: bool = False


def traits_of(model: Any) -> TrainingTraits:
    """
    Returns the traits of a model or of a model class.

    # Raises

    `ConfigurationError`
        If it has an attribute with the name of a trait, as in versions before 0.4.0.
    """
    for name in (field.name for field in fields(TrainingTraits)):
        if hasattr(model, name):
            kind = model if isinstance(model, type) else type(model)
            # The other traits of a base class stay.
            base = next((each for each in kind.__mro__ if "training_traits" in vars(each)), None)
            traits = (
                "TrainingTraits(" if base is None else f"replace({base.__name__}.training_traits, "
            )
            raise ConfigurationError(
                f"{kind.__name__} has an attribute '{name}', which is a trait: write "
                f"`training_traits = {traits}{name}=...)` in the class instead, with "
                "`dataclasses.replace` and `allennlp_deepspeed.TrainingTraits`."
            )
    return getattr(model, "training_traits", TrainingTraits())
