"""
Over how many things the losses of models are means. A loss that is a mean can be computed in
parts: the mean of the whole is that of the parts, weighed by these numbers.
"""

from typing import Any, Callable, Dict, Protocol, Type, Union, runtime_checkable

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import BasicClassifier, Model, SimpleTagger
from allennlp.nn.util import get_text_field_mask

from allennlp_deepspeed.training.chunking import has_batch_statistics

Number = Union[float, torch.Tensor]

# Labels that PyTorch's cross entropy leaves out.
_IGNORED = -100


@runtime_checkable
class CountsLossTerms(Protocol):
    """A model that says over how many instances, tokens or whatever else its loss is a mean."""

    def num_loss_terms(self, **inputs: Any) -> Number:
        """
        The number of things of which `forward` of the same inputs gives the mean loss, or the sum
        of their weights, which needn't be an integer. Where there are none, the loss is to be 0,
        not NaN. Called before `forward`, with the batch where the data loader has left it.

        # Returns

        `Union[float, torch.Tensor]`
            A number, or a tensor without dimensions.
        """


def num_loss_terms(model: Model, inputs: Dict[str, Any]) -> Number:
    """
    # Parameters

    model : `Model`, required.
        Whose class `check_class` doesn't refuse.
    inputs : `Dict[str, Any]`, required.
        Of `forward`.
    """
    if isinstance(model, CountsLossTerms):
        return model.num_loss_terms(**inputs)
    return _OF_ALLENNLP[type(model)](model, inputs)


def is_nan_of_none(model: Model) -> bool:
    """
    Whether the loss of a batch without anything to average over is PyTorch's cross entropy, which
    is NaN then, but has a gradient of 0 for a factor of 0. Of other models such a NaN is an error.
    """
    return type(model) is BasicClassifier


def averages_over_tokens(model: Model) -> bool:
    """Return whether losses are weighed by tokens in any case, as those of a `TokenLossModel`."""
    return getattr(model, "averages_loss_over_tokens", False)


def check_class(model: Type[Model]) -> None:
    """
    # Raises

    `ConfigurationError`
        If it isn't known that the loss of these models is a mean, and over what.
    """
    auto = "'trainer.num_gradient_accumulation_steps' is \"auto\""
    if getattr(model, "compares_examples", False):
        raise ConfigurationError(
            f"{auto}, but the loss of a {model.__name__} compares the examples of a batch with "
            "each other, and is no mean of those of parts: write "
            '"grad_cache": {"chunk_size": "auto"} in its place, without \'global_batch_size\'.'
        )
    if model not in _OF_ALLENNLP and not hasattr(model, "num_loss_terms"):
        raise ConfigurationError(
            f"{auto}, but nothing says over what the loss of a {model.__name__} is a mean: give "
            "the model a method 'num_loss_terms', which is called with the inputs of 'forward' and "
            "returns the number of instances, or of tokens, or write a number of steps."
        )


def check(model: Model) -> None:
    """
    # Raises

    `ConfigurationError`
        If the loss of a batch of this model isn't the mean of those of its parts.
    """
    check_class(type(model))
    if getattr(model, "has_router_loss", False):
        raise ConfigurationError(
            "'trainer.num_gradient_accumulation_steps' is \"auto\", but the loss that balances the "
            "load of experts ('output_router_logits') is no mean of those of parts of a batch: "
            "write a number of steps, or \"output_router_logits\": false into 'model.config' or "
            "'model.transformer_kwargs'."
        )
    for name, module in model.named_modules():
        if has_batch_statistics(module):
            raise ConfigurationError(
                "'trainer.num_gradient_accumulation_steps' is \"auto\", which can't be used with "
                f"{type(module).__name__} ('{name}'), whose statistics would be those of a "
                "micro-batch of any size: use layer normalization, or write a number of steps."
            )


def _of_basic_classifier(model: Any, inputs: Dict[str, Any]) -> Number:
    return (inputs["label"] != _IGNORED).sum()


def _of_simple_tagger(model: Any, inputs: Dict[str, Any]) -> Number:
    """
    AllenNLP's `sequence_cross_entropy_with_logits` averages over tokens, and then over the
    instances that have any.
    """
    # Shape: (batch_size, num_tokens)
    mask = get_text_field_mask(inputs["tokens"])
    if inputs.get("ignore_loss_on_o_tags", False):
        o_tag = model.vocab.get_token_index("O", namespace=model.label_namespace)
        mask = mask & (inputs["tags"] != o_tag)
    return mask.any(dim=1).sum()


# Exactly these: a class derived from one may compute another loss.
_OF_ALLENNLP: Dict[Type[Model], Callable[[Any, Dict[str, Any]], Number]] = {
    BasicClassifier: _of_basic_classifier,
    SimpleTagger: _of_simple_tagger,
}
