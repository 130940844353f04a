"""Output head of a causal language model: how logits are computed from hidden states."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Optional
from unittest import mock

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Adjustment = Callable[[torch.Tensor], torch.Tensor]

# Typical logits, around 0 and where a cap has an effect.
_PROBES = (-60.0, -7.0, -0.5, 0.0, 1.0, 9.0, 70.0)


class OutputHead(NamedTuple):
    """
    Output head whose logits are `adjust(output_layer(hidden))`, element by element.

    # Parameters

    backbone_name : `str`
        The attribute or method of the model that returns the module that computes hidden states. It
        is a name, so that a copy of the model uses its own backbone.
    adjust : `Callable[[torch.Tensor], torch.Tensor]`
        The model's adjustment of logits, such as a cap, `None` if there is none.
    """

    backbone_name: str
    adjust: Optional[Adjustment]

    def backbone(self, transformer: "PreTrainedModel") -> torch.nn.Module:
        """Returns the backbone of a model of the same kind."""
        backbone = getattr(transformer, self.backbone_name)
        return backbone if isinstance(backbone, torch.nn.Module) else backbone()

    def router_loss(
        self,
        transformer: "PreTrainedModel",
        outputs: Any,
        input_ids: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """
        Computes the load-balancing loss of a mixture of experts without running its layers.

        # Parameters

        transformer : `PreTrainedModel`, required.
        outputs : `ModelOutput`, required.
            The backbone's outputs, with `router_logits`.
        input_ids : `torch.Tensor`, required.
            Of shape (batch_size, length).
        attention_mask : `torch.Tensor`, required.
            Of the same shape, 0 for padding, which isn't counted.
        """
        backbone, output_layer = self.backbone(transformer), transformer.get_output_embeddings()
        with (
            mock.patch.object(backbone, "forward", lambda *args, **kwargs: outputs),
            mock.patch.object(output_layer, "forward", lambda hidden: hidden),
        ):
            return transformer(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).aux_loss


class _States(BaseModelOutputWithPast):
    """
    Outputs of any backbone. Fields that only some backbones have, such as router logits, are
    `None`.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def find_output_head(transformer: "PreTrainedModel") -> Optional[OutputHead]:
    """
    Finds how a model computes logits from hidden states by running it on probe values. No weight is
    read.

    # Returns

    `Optional[OutputHead]`
        `None` if it isn't an output layer with an optional factor or cap.
    """
    output_layer = transformer.get_output_embeddings()
    vocabulary_size = getattr(output_layer, "out_features", None)
    if vocabulary_size is None:
        return None
    probes = torch.tensor(_PROBES, device="cpu")
    values = probes[None, :, None].expand(1, len(probes), vocabulary_size).clone()
    # A model that also has an encoder, or could have one, calls its decoder.
    for name in ("base_model", "get_decoder", "model"):
        if not hasattr(transformer, name):
            continue
        backbone = OutputHead(name, None).backbone(transformer)
        if backbone is transformer:
            continue
        try:
            results = _logits_for(transformer, backbone, output_layer, values)
        except Exception as error:
            # Any error of a model that does more with its layers than to call them.
            logger.debug("%s: %s", type(transformer).__name__, error)
            continue
        if results.shape != values.shape or (results != results[..., :1]).any():
            continue
        for adjust in _adjustments(transformer, results[0, :, 0], probes):
            adjusted = probes if adjust is None else adjust(probes)
            if torch.allclose(adjusted, results[0, :, 0], rtol=1e-6, atol=1e-6):
                return OutputHead(name, adjust)
    return None


@torch.no_grad()
def _logits_for(
    transformer: "PreTrainedModel",
    backbone: torch.nn.Module,
    output_layer: torch.nn.Module,
    values: torch.Tensor,
) -> torch.Tensor:
    """Returns the model's logits for these outputs of its output layer."""

    def states(*args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=values.clone())

    ids = torch.zeros(values.shape[:2], dtype=torch.int64, device=values.device)
    with (
        mock.patch.object(backbone, "forward", states),
        mock.patch.object(output_layer, "forward", lambda hidden: hidden),
    ):
        return transformer(input_ids=ids, use_cache=False).logits


def _adjustments(
    transformer: "PreTrainedModel", results: torch.Tensor, probes: torch.Tensor
) -> Iterator[Optional[Adjustment]]:
    factor = float(results[_PROBES.index(1.0)])
    yield None if factor == 1 else partial(torch.mul, other=factor)
    config = transformer.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        cap = getattr(config, name, None)
        if cap:
            yield partial(_capped, cap=cap)


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap
