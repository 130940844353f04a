from typing import Any, Dict, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from overrides import overrides
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from allennlp_deepspeed.language_modeling.chunked_cross_entropy import (
    IGNORED,
    TokenLosses,
    chunked_cross_entropy,
)
from allennlp_deepspeed.language_modeling.token_loss_model import TokenLossModel
from allennlp_deepspeed.language_modeling.token_metrics import TokenMetrics


@Model.register("causal_lm")
class CausalLM(TokenLossModel):
    """
    Any of transformers' causal language models. For the fields of the "causal_lm" reader. Its loss
    is the mean over the tokens that are to be predicted; logits are computed for a chunk of them at
    a time.

    Registered as a `Model` with name "causal_lm".

    # Parameters

    vocab : `Vocabulary`, required.
    model_name : `str`, optional (default = `None`)
        The name or the directory of a pretrained model.
    config : `Dict[str, Any]`, optional (default = `None`)
        In the place of `model_name`: the configuration of a model with random weights, such as
        `{"model_type": "llama", "hidden_size": 256}`.
    transformer_kwargs : `Dict[str, Any]`, optional (default = `None`)
        Further arguments of `AutoModelForCausalLM.from_pretrained`, or with `config` of
        `from_config`, such as `attn_implementation`.
    loss_chunk_size : `int`, optional (default = `1024`)
        The number of positions of which there are logits at a time.
    regularizer : `RegularizerApplicator`, optional (default = `None`)
    """

    def __init__(
        self,
        vocab: Vocabulary,
        model_name: Optional[str] = None,
        config: Optional[Dict[str, Any]] = None,
        transformer_kwargs: Optional[Dict[str, Any]] = None,
        loss_chunk_size: int = 1024,
        regularizer: Optional[RegularizerApplicator] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocab, regularizer, **kwargs)
        if (model_name is None) == (config is None):
            raise ConfigurationError(
                "Give one of 'model.model_name' and 'model.config': the name or directory of a "
                'pretrained model, or a configuration such as {"model_type": "llama", ...} for '
                "random weights."
            )
        if loss_chunk_size < 1:
            raise ConfigurationError(
                f"'model.loss_chunk_size' is {loss_chunk_size}: give a number of tokens that is "
                "at least 1, 1024 for example."
            )
        self.transformer = _construct(model_name, config, transformer_kwargs or {})
        self._loss_chunk_size = loss_chunk_size
        self._metrics = TokenMetrics()

    @overrides(check_signature=False)
    def num_loss_tokens(
        self, labels: Optional[torch.Tensor] = None, **inputs: Any
    ) -> Union[int, torch.Tensor]:
        return 0 if labels is None else (_next_tokens(labels) != IGNORED).sum()

    @overrides(check_signature=False)
    def forward(
        self,
        input_ids: torch.Tensor,
        labels: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
    ) -> Dict[str, torch.Tensor]:
        """
        Padding is on the right, where causal attention doesn't look.

        # Parameters

        input_ids : `torch.Tensor`, required.
            Of shape (batch_size, length).
        labels : `torch.Tensor`, optional (default = `None`)
            Of shape (batch_size, length), the same tokens, and -100 for those that aren't to be
            predicted, such as padding.
        position_ids : `torch.Tensor`, optional (default = `None`)
            Of shape (batch_size, length). Examples in the same row that don't attend to each other
            begin where it is 0.

        # Returns

        `Dict[str, torch.Tensor]`
            With labels, a scalar "loss"; without, "logits" of shape
            (batch_size, length, vocabulary_size).
        """
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if labels is None:
            return {"logits": self.transformer(**inputs).logits}
        hidden = self.transformer.base_model(**inputs).last_hidden_state
        losses = self._token_losses(hidden, _next_tokens(labels))
        self._metrics(losses)
        return {"loss": losses.total / losses.num_targets.clamp(min=1)}

    def _token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        """
        # Parameters

        hidden : `torch.Tensor`, required.
            Of shape (batch_size, length, hidden_size).
        targets : `torch.Tensor`, required.
            Of shape (batch_size, length): the token after each position, -100 where it isn't to be
            predicted.
        """
        output_layer = self.transformer.get_output_embeddings()
        return chunked_cross_entropy(
            output_layer, hidden, targets, self._loss_chunk_size, adjust=lambda logits: logits
        )

    @overrides
    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        """With `reset`, to be called by every rank."""
        return self._metrics.get_metric(reset)


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """The token after each position, of the same shape."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _construct(
    model_name: Optional[str], config: Optional[Dict[str, Any]], arguments: Dict[str, Any]
) -> PreTrainedModel:
    arguments = {"torch_dtype": torch.float32, **arguments}
    if config is None:
        return AutoModelForCausalLM.from_pretrained(model_name, **arguments)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **arguments)
