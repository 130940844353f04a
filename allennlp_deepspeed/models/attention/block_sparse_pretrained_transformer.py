"""
AllenNLP's "pretrained_transformer" embedder with block-sparse attention, through the attention
interface of transformers 5.
"""

import json
import logging
from typing import Any, Optional, Tuple

import torch
import transformers
from allennlp.common.checks import ConfigurationError
from allennlp.modules.token_embedders import PretrainedTransformerEmbedder, TokenEmbedder
from typing_extensions import override

from allennlp_deepspeed.models.attention.block_sparse_attention import (
    BlockSparseAttention,
    attention_from_section,
)

logger = logging.getLogger(__name__)

# Values of `model_type` for which a test compares with dense attention.
TESTED = ("albert", "bert", "distilbert", "electra", "gpt2", "llama", "qwen3", "roberta")

# The name in transformers' registry, and the attribute of a model's config with the section.
_NAME = "block_sparse"
_SECTION = "block_sparse_attention"

# Keys of models' configs for the dropout of attention weights.
_DROPOUT_KEYS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")

# Arguments of attention functions that have no effect here.
_WITHOUT_EFFECT = {"is_causal", "position_ids", "use_cache", "cache_position"}


@TokenEmbedder.register("block_sparse_pretrained_transformer")
class BlockSparsePretrainedTransformerEmbedder(PretrainedTransformerEmbedder):
    """
    AllenNLP's `PretrainedTransformerEmbedder` with block-sparse attention in all layers, and the
    same weights.

    Registered as a `TokenEmbedder` with name "block_sparse_pretrained_transformer".

    # Parameters

    model_name : `str`, required.
        A model of one of the types in `TESTED`.
    attention : `BlockSparseAttention`, required.
        Such as `{"type": "block_sparse", "mode": "bslongformer", "block":
        64}`. A causal model also needs `"attention": "unidirectional"`.
    transformer_kwargs : `Dict[str, Any]`, optional (default = `None`)
        As for `PretrainedTransformerEmbedder`. It must disable the dropout of attention weights,
        which most models have: `{"attention_probs_dropout_prob": 0}` for BERT.
    kwargs : `Any`
        As for `PretrainedTransformerEmbedder`.
    """

    def __init__(self, model_name: str, *, attention: BlockSparseAttention, **kwargs: Any) -> None:
        super().__init__(model_name, **kwargs)
        _register()
        config = self.transformer_model.config
        _check(config, attention)
        for module in self.transformer_model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                setattr(module.config, _SECTION, attention.section)
        self.transformer_model.set_attn_implementation(_NAME)
        _number_layers(self.transformer_model)

    @override
    def train(self, mode: bool = True) -> "BlockSparsePretrainedTransformerEmbedder":
        return super().train(mode)


def warn_of_dense_attention(transformer: torch.nn.Module) -> None:
    """Warns that transformers would load a block-sparse model with dense attention."""
    config: Any = getattr(transformer, "config", None)
    if getattr(config, "_attn_implementation", None) == _NAME:
        logger.warning(
            "This %s was trained with block-sparse attention, but transformers and peft load it "
            "with dense attention, which gives other outputs. For the same outputs, use the "
            'embedder "block_sparse_pretrained_transformer" with "attention": %s.',
            type(transformer).__name__,
            json.dumps(getattr(config, _SECTION)),
        )


def _check(config: Any, attention: BlockSparseAttention) -> None:
    """
    Checks that the model supports this attention.

    # Raises

    `ConfigurationError`
        If the model doesn't support it.
    """
    if config.model_type not in TESTED:
        raise ConfigurationError(
            f"'attention' isn't tested with models of type '{config.model_type}', only "
            f"{', '.join(TESTED)}: write one of these as 'model_name', or use the embedder "
            '"pretrained_transformer".'
        )
    for key in _DROPOUT_KEYS:
        if getattr(config, key, 0):
            raise ConfigurationError(
                f"The model's '{key}' is {getattr(config, key)}, but flex_attention doesn't "
                f'support dropout of attention weights: write "transformer_kwargs": {{"{key}": '
                "0}."
            )


def _number_layers(transformer: torch.nn.Module) -> None:
    """Sets the layer index of attention modules, which random blocks depend on."""
    attending = [
        module
        for module in transformer.modules()
        if _is_attention(module) and not any(map(_is_attention, list(module.modules())[1:]))
    ]
    for layer, module in enumerate(attending):
        # Most models set it, but DistilBERT doesn't, and ALBERT shares one module between all
        # layers.
        if getattr(module, "layer_idx", None) is None:
            module.layer_idx = layer  # type: ignore[assignment]


def _is_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _padding_mask)


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    config: Any,
    attention_mask: Optional[torch.Tensor] = None,
    device: Optional[torch.device] = None,
    **_: Any,
) -> torch.Tensor:
    """
    Replaces the masks that transformers make for attention with the padding mask. The layout
    decides the rest.

    # Returns

    `torch.BoolTensor`
        Shape (batch_size, kv_length).
    """
    from transformers import masking_utils

    is_unidirectional = attention_from_section(
        json.dumps(getattr(config, _SECTION))
    ).layout.is_unidirectional
    if mask_function is masking_utils.causal_mask_function:
        if not is_unidirectional:
            raise ConfigurationError(
                f"A model of type '{config.model_type}' is causal: write \"attention\": {{..., "
                '"attention": "unidirectional"}.'
            )
    elif mask_function is not masking_utils.bidirectional_mask_function:
        raise ConfigurationError(
            f"The model of type '{config.model_type}' masks more than padding, which block-sparse "
            "attention doesn't support; remove 'attention'."
        )
    if q_length != kv_length:
        raise ConfigurationError(
            'Block-sparse attention doesn\'t support a cache: write "transformer_kwargs": '
            '{"use_cache": false}.'
        )
    if attention_mask is None:
        return torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return attention_mask[:, -kv_length:].bool()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """
    Attention function that is registered with transformers.

    # Parameters

    query, key, value : `torch.Tensor`
        Shape (batch_size, heads, length, head_dim). Keys and values have fewer heads if several
        query heads share one.
    attention_mask : `torch.BoolTensor`
        As `_padding_mask` returns it.

    # Returns

    `torch.Tensor`
        Shape (batch_size, length, heads, head_dim).
    """
    unknown = [
        name
        for name, argument in kwargs.items()
        if argument is not None and argument is not False and name not in _WITHOUT_EFFECT
    ]
    if unknown or dropout or attention_mask is None or attention_mask.dim() != 2:
        what = ", ".join(unknown) or ("dropout" if dropout else "masks of its own")
        raise ConfigurationError(
            f"{type(module).__name__} needs attention features that block-sparse attention "
            f"doesn't support: {what}. Remove 'attention', or disable them."
        )
    groups = query.size(1) // key.size(1)
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    attention = attention_from_section(json.dumps(getattr(module.config, _SECTION)))
    layer: Any = module.layer_idx
    result = attention.attend(query, key, value, attention_mask, layer, scaling)
    return result.transpose(1, 2), None
