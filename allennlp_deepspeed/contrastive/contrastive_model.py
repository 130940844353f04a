import inspect
from typing import Any, Callable, Dict, NamedTuple, Optional, Set

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from overrides import overrides

from allennlp_deepspeed.contrastive.gathering import gather_examples, sum_over_ranks
from allennlp_deepspeed.engine.agreement import world_size


class ContrastiveModel(Model):
    """
    A model whose loss compares each example with all others, in the two parts that gradient caching
    needs apart: `encode`, which sees each example alone, and `contrastive_loss`, which sees the
    representations of all. `forward` is one after the other, so that the model also trains without
    gradient caching, with any trainer, validates and predicts.

    Which inputs go to which part is said by the names of their arguments. An input that both name
    goes to both; `**inputs` takes what the other part doesn't name, that of `encode` first.

    # Parameters

    vocab : `Vocabulary`, required.
    negatives : `str`, optional (default = `"global"`)
        What the loss sees in training with several workers: `"global"`, the batches of all of them
        as one, or `"local"`, those of its own worker.
    regularizer : `RegularizerApplicator`, optional (default = `None`)
    """

    compares_examples = True
    """Whether the loss of a batch isn't the mean of those of its parts."""

    validates_whole_set = False
    """
    Whether the metrics of validation are those of all examples together, each counted once also if
    it comes twice. The "deepspeed" trainer then leaves none out where workers have different
    amounts.
    """

    divides_loss = False
    """
    Whether `contrastive_loss` has an argument `rows`, a slice of the examples, and returns their
    part of the loss: the sum over these examples divided by the number of all. Of several workers
    with global negatives each then computes the part of its own examples, and not the whole.
    """

    def __init__(
        self,
        vocab: Vocabulary,
        negatives: str = "global",
        regularizer: Optional[RegularizerApplicator] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocab, regularizer, **kwargs)
        if negatives not in ("global", "local"):
            raise ConfigurationError(
                f"'model.negatives' is {negatives!r}: write \"global\" for those of all workers' "
                'batches, or "local" for those of each worker\'s own.'
            )
        self.negatives = negatives
        self._of_encode = _arguments(self.encode)
        self._of_loss = _arguments(self.contrastive_loss)
        # A subclass that overrides it without the argument computes the whole.
        self._divides_loss = self.divides_loss and "rows" in self._of_loss.names
        if self._divides_loss:
            self._of_loss.names.remove("rows")

    @property
    def has_loss_of_all_ranks(self) -> bool:
        """Whether all ranks divide the loss by the same number of micro-batches."""
        return self.negatives == "global"

    def encode(self, **inputs: Any) -> Dict[str, torch.Tensor]:
        """
        Must neither update metrics nor compute anything across examples: with gradient caching it
        runs twice, and on a few examples at a time. For the same reason it must not change buffers.
        A model for which the trainer is to have chunks of different sizes for each of its inputs
        must take any of them alone.

        # Returns

        `Dict[str, torch.Tensor]`
            Representations by name, each of shape (batch_size, ...).
        """
        raise NotImplementedError

    def contrastive_loss(
        self, representations: Dict[str, torch.Tensor], **inputs: Any
    ) -> Dict[str, torch.Tensor]:
        """
        Every worker computes the same, if negatives are global and the loss isn't divided.

        # Parameters

        representations : `Dict[str, torch.Tensor]`
            Of the whole global batch, in the order of the ranks; in evaluation, or where
            `negatives` is "local", of the worker's own.
        inputs : `Any`
            Tensors that this method names, of the same examples. Where workers have different sizes
            in other dimensions than the first, they are padded with zeros.

        # Returns

        `Dict[str, torch.Tensor]`
            With a scalar `"loss"`. If it is divided, what else there is is of this worker's part.
        """
        raise NotImplementedError

    @overrides(check_signature=False)
    def forward(self, **inputs: Any) -> Dict[str, torch.Tensor]:
        """
        With several workers and global negatives, every one must call it in training.

        # Returns

        `Dict[str, torch.Tensor]`
            What `contrastive_loss` returns; not in training, the representations too, which are
            what is predicted.
        """
        representations = self.encode(**self.encoder_inputs(inputs))
        outputs = self.loss_over_ranks(representations, self.loss_inputs(inputs))
        return outputs if self.training else {**representations, **outputs}

    def loss_over_ranks(
        self, representations: Dict[str, torch.Tensor], loss_inputs: Dict[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        """
        `contrastive_loss` of what all ranks have given. Each goes back into its own
        representations, which get the gradient of the one loss. To be called by every rank.
        """
        if self.training and self.negatives == "global":
            for name, value in loss_inputs.items():
                if not isinstance(value, torch.Tensor):
                    raise ConfigurationError(
                        f"'{name}' is an argument of `contrastive_loss` of {type(self).__name__}, "
                        f"and a {type(value).__name__}: only tensors can be gathered from all "
                        "workers."
                    )
            # Names of inputs and representations may be the same.
            joined = {
                **{f"r {name}": tensor for name, tensor in representations.items()},
                **{f"i {name}": tensor for name, tensor in loss_inputs.items()},
            }
            is_divided = self._divides_loss and world_size() > 1
            gathered, rows = gather_examples(joined, is_divided)
            representations = {name: gathered[f"r {name}"] for name in representations}
            loss_inputs = {name: gathered[f"i {name}"] for name in loss_inputs}
            if is_divided:
                outputs = self.contrastive_loss(representations, rows=rows, **loss_inputs)
                if outputs["loss"].dim() > 0:
                    raise ConfigurationError(
                        f"The loss of {type(self).__name__} has shape "
                        f"{tuple(outputs['loss'].shape)}, but with 'divides_loss' it is a scalar: "
                        "return the sum over the rows divided by the number of all examples."
                    )
                return {**outputs, "loss": sum_over_ranks(outputs["loss"])}
        return self.contrastive_loss(representations, **loss_inputs)

    def filler(self, batch: TensorDict) -> TensorDict:
        """The same one again, whose examples are counted once."""
        return batch

    def encoder_inputs(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """
        Those for `encode`.

        # Raises

        `ConfigurationError`
            If there is an input for neither part.
        """
        for name in inputs:
            if not self.encodes(name) and not self._compares(name):
                raise ConfigurationError(
                    f"The data has '{name}', but neither `encode` nor `contrastive_loss` of "
                    f"{type(self).__name__} has an argument of that name."
                )
        return {name: value for name, value in inputs.items() if self.encodes(name)}

    def loss_inputs(self, inputs: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        """Those for `contrastive_loss`."""
        return {name: value for name, value in inputs.items() if self._compares(name)}

    def encodes(self, name: str) -> bool:
        """Whether an input of that name is for `encode`."""
        return name in self._of_encode.names or (
            self._of_encode.others and name not in self._of_loss.names
        )

    def _compares(self, name: str) -> bool:
        return name in self._of_loss.names or (self._of_loss.others and not self.encodes(name))


class _Arguments(NamedTuple):
    """Those of a function: their names, and whether it takes others."""

    names: Set[str]
    others: bool


def _arguments(function: Callable) -> _Arguments:
    parameters = inspect.signature(function).parameters.values()
    return _Arguments(
        {p.name for p in parameters if p.kind is not p.VAR_KEYWORD},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
