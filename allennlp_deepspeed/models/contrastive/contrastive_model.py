import inspect
from dataclasses import replace
from typing import Any, Callable, Dict, NamedTuple, Optional, Set

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from typing_extensions import override

from allennlp_deepspeed.engine.process.collectives import world_size
from allennlp_deepspeed.models.contrastive.gathering import gather_examples, sum_over_ranks
from allennlp_deepspeed.training_traits import TrainingTraits


class ContrastiveModel(Model):
    """
    Base class of models whose loss compares each example with all others. The loss has the two
    parts that gradient caching needs: `encode` sees each example by itself, and `contrastive_loss`
    sees the representations of all examples. `forward` runs both, so that the model also trains
    without gradient caching, with any trainer, validates and predicts.

    The names of the arguments decide which part an input is passed to. An input that both name is
    passed to both. `**inputs` takes the inputs that the other part doesn't name; if both parts have
    it, `encode` takes them.

    # Parameters

    vocab : `Vocabulary`, required.
    negatives : `str`, optional (default = `"global"`)
        What the training loss compares with several workers: `"global"`, the batches of all ranks
        as one batch, or `"local"`, each rank's own batch.
    regularizer : `RegularizerApplicator`, optional (default = `None`)
    """

    training_traits = TrainingTraits(
        indivisible_loss="the loss of a contrastive model compares the examples of a batch, and "
        'isn\'t a mean over them: write "grad_cache": {"chunk_size": "auto"} instead, without '
        "'trainer.global_batch_size'."
    )
    """
    With `validates_whole_set`, the validation metrics are computed over all examples together and
    count each example once, even if it is repeated.
    """

    divides_loss = False
    """
    If `True`, `contrastive_loss` has an argument `rows`, a slice of the examples, and returns their
    part of the loss: the sum over these examples divided by the number of all examples. With
    several workers and global negatives each rank then computes the part of its own examples only.
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
                f"'model.negatives' is {negatives!r}: write \"global\" for negatives of all "
                'workers, or "local" for those of the same worker.'
            )
        self.negatives = negatives
        self._encode_arguments = _arguments(self.encode)
        self._loss_arguments = _arguments(self.contrastive_loss)
        # A subclass that overrides the method without the argument computes the full loss.
        self._divides_loss = self.divides_loss and "rows" in self._loss_arguments.names
        if self._divides_loss:
            self._loss_arguments.names.remove("rows")

    @property
    def negatives(self) -> str:
        return self._negatives

    @negatives.setter
    def negatives(self, value: str) -> None:
        self._negatives = value
        self.training_traits = replace(
            self.training_traits, has_loss_of_all_ranks=value == "global"
        )

    def encode(self, **inputs: Any) -> Dict[str, torch.Tensor]:
        """
        Encodes each example by itself. With gradient caching it runs twice, on a few examples at a
        time, so it must not update metrics, change buffers or attributes, use a random generator of
        its own, or compute anything across examples. It may change its inputs in place. If the
        trainer is to choose a chunk size for each input, it must accept any input alone.

        # Returns

        `Dict[str, torch.Tensor]`
            Representations by name, each of shape (batch_size, ...).
        """
        raise NotImplementedError

    def contrastive_loss(
        self, representations: Dict[str, torch.Tensor], **inputs: Any
    ) -> Dict[str, torch.Tensor]:
        """
        Computes the loss of the representations of all examples. Every rank computes the same loss
        if negatives are global and the loss isn't divided.

        # Parameters

        representations : `Dict[str, torch.Tensor]`
            Those of the global batch, in rank order; in evaluation, or if `negatives` is "local",
            those of this rank's batch.
        inputs : `Any`
            Tensors that this method names, of the same examples. Where ranks have different sizes
            in dimensions after the first, they are padded with zeros.

        # Returns

        `Dict[str, torch.Tensor]`
            A dictionary with a scalar `"loss"`. If the loss is divided, all other outputs are for
            this rank's part.
        """
        raise NotImplementedError

    @override
    def forward(self, **inputs: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        """
        Encodes the inputs and computes the loss over all ranks. In training with several workers
        and global negatives, every rank must call it.

        # Returns

        `Dict[str, torch.Tensor]`
            The outputs of `contrastive_loss`; in evaluation also the representations, which are the
            predictions.
        """
        representations = self.encode(**self.encoder_inputs(inputs))
        outputs = self.loss_over_ranks(representations, self.loss_inputs(inputs))
        return outputs if self.training else {**representations, **outputs}

    def loss_over_ranks(
        self, representations: Dict[str, torch.Tensor], loss_inputs: Dict[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        """
        Computes `contrastive_loss` on the gathered examples of all ranks. Each rank backpropagates
        into its own representations, which get the gradient of the global loss. Every rank must
        call it.
        """
        if self.training and self.negatives == "global":
            for name, value in loss_inputs.items():
                if not isinstance(value, torch.Tensor):
                    raise ConfigurationError(
                        f"'{name}', an argument of `contrastive_loss` of {type(self).__name__}, "
                        f"is a {type(value).__name__}: only tensors can be gathered from all "
                        "workers."
                    )
            # Inputs and representations may have the same names.
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
                        f"{tuple(outputs['loss'].shape)}, but with 'divides_loss' it must be a "
                        "scalar: return the sum over the rows divided by the number of all "
                        "examples."
                    )
                return {**outputs, "loss": sum_over_ranks(outputs["loss"])}
        return self.contrastive_loss(representations, **loss_inputs)

    def dummy_batch(self, batch: TensorDict) -> TensorDict:
        """Returns the same batch, whose examples are counted once."""
        return batch

    def encoder_inputs(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """
        Returns the inputs of `encode`.

        # Raises

        `ConfigurationError`
            If an input belongs to neither part.
        """
        for name in inputs:
            if not self.encodes(name) and not self._compares(name):
                raise ConfigurationError(
                    f"The data has '{name}', but neither `encode` nor `contrastive_loss` of "
                    f"{type(self).__name__} has an argument of that name."
                )
        return {name: value for name, value in inputs.items() if self.encodes(name)}

    def loss_inputs(self, inputs: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        """Returns the inputs of `contrastive_loss`."""
        return {name: value for name, value in inputs.items() if self._compares(name)}

    def encodes(self, name: str) -> bool:
        """Returns whether an input of that name is passed to `encode`."""
        return name in self._encode_arguments.names or (
            self._encode_arguments.others and name not in self._loss_arguments.names
        )

    def _compares(self, name: str) -> bool:
        return name in self._loss_arguments.names or (
            self._loss_arguments.others and not self.encodes(name)
        )


class _Arguments(NamedTuple):
    """Arguments of a function: their names, and whether it takes others."""

    names: Set[str]
    others: bool


def _arguments(function: Callable) -> _Arguments:
    parameters = inspect.signature(function).parameters.values()
    return _Arguments(
        {p.name for p in parameters if p.kind is not p.VAR_KEYWORD},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
