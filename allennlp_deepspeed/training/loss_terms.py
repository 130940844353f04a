"""
Numbers of terms that the losses of models are means over. A loss that is a mean can be computed in
parts: the mean over all terms is that of the parts, weighted by these numbers.
"""

from typing import Any, Callable, Dict, Protocol, Type, Union, runtime_checkable

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import BasicClassifier, Model, SimpleTagger
from allennlp.nn.util import get_text_field_mask

from allennlp_deepspeed.training.chunking import has_batch_statistics
from allennlp_deepspeed.training_traits import traits_of

Number = Union[float, torch.Tensor]

# Labels that PyTorch's cross entropy ignores.
_IGNORED = -100

_AUTO = "'trainer.num_gradient_accumulation_steps' is \"auto\""


@runtime_checkable
class CountsLossTerms(Protocol):
    """
    Protocol of models that count the instances, tokens or other terms that their loss is a mean
    over.
    """

    def num_loss_terms(self, **inputs: Any) -> Number:
        """
        Returns the number of terms that the loss of `forward` is a mean over, given the same
        inputs, or the sum of their weights, which needn't be an integer. If there are none, the
        loss must be 0, not NaN. It is called before `forward`, with the batch on the data loader's
        device.

        # Returns

        `Union[float, torch.Tensor]`
            A number, or a scalar tensor.
        """


def num_loss_terms(model: Model, inputs: Dict[str, Any]) -> Number:
    """
    Returns the number of terms that a model's loss is a mean over.

    # Parameters

    model : `Model`, required.
        A model whose class passes `check_class`.
    inputs : `Dict[str, Any]`, required.
        The inputs of `forward`.
    """
    if isinstance(model, CountsLossTerms):
        return model.num_loss_terms(**inputs)
    return _OF_ALLENNLP[type(model)](model, inputs)


def is_nan_without_terms(model: Model) -> bool:
    """
    Returns whether the loss of a batch without terms is PyTorch's cross entropy, which is NaN then,
    but has a gradient of 0 for a factor of 0. For other models such a NaN is an error.
    """
    return type(model) is BasicClassifier


def averages_over_tokens(model: Model) -> bool:
    """Returns whether losses are always weighted by tokens, as those of a `TokenLossModel`."""
    return traits_of(model).averages_loss_over_tokens


def check_class(model: Type[Model]) -> None:
    """
    Checks that a model class declares the terms of its loss.

    # Raises

    `ConfigurationError`
        If the terms of the loss aren't known, or if it isn't a mean.
    """
    _check_is_mean(model)
    if model not in _OF_ALLENNLP and not hasattr(model, "num_loss_terms"):
        raise ConfigurationError(
            f"{_AUTO}, but it is unknown what the loss of {model.__name__} is averaged over: add a "
            "method 'num_loss_terms' to the model, which takes the inputs of 'forward' and "
            "returns the number of instances or tokens, or write a number of accumulation steps."
        )


def _check_is_mean(model: Union[Model, Type[Model]]) -> None:
    reason = traits_of(model).indivisible_loss
    if reason is not None:
        raise ConfigurationError(f"{_AUTO}, but {reason}")


def check(model: Model) -> None:
    """
    Checks that the loss of a batch is the mean of the losses of its parts.

    # Raises

    `ConfigurationError`
        If it isn't for this model.
    """
    check_class(type(model))
    _check_is_mean(model)
    for name, module in model.named_modules():
        if has_batch_statistics(module):
            raise ConfigurationError(
                f"{_AUTO}, but {type(module).__name__} ('{name}') computes statistics over a "
                "micro-batch, whose size varies: use layer normalization, or write a number of "
                "accumulation steps."
            )


def _count_for_simple_tagger(model: Any, inputs: Dict[str, Any]) -> Number:
    """Counts the instances with any token that has a loss."""
    # Shape: (batch_size, num_tokens)
    mask = get_text_field_mask(inputs["tokens"])
    if inputs.get("ignore_loss_on_o_tags", False):
        o_tag = model.vocab.get_token_index("O", namespace=model.label_namespace)
        mask = mask & (inputs["tags"] != o_tag)
    # `sequence_cross_entropy_with_logits` averages over tokens, and then over these instances.
    return mask.any(dim=1).sum()


# Exactly these classes: a subclass may compute another loss.
_OF_ALLENNLP: Dict[Type[Model], Callable[[Any, Dict[str, Any]], Number]] = {
    BasicClassifier: lambda model, inputs: (inputs["label"] != _IGNORED).sum(),
    SimpleTagger: _count_for_simple_tagger,
}
