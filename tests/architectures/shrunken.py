"""
Configurations of models of a few thousand parameters, of any model type, from the names of the keys
that the classes of configurations share.
"""

import re
from typing import Any, Dict, List

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY_SIZE = 64

# The names of keys, and a value for them: the first that matches. Heads are 4 of 8 dimensions.
_VALUES = [
    (r"(vocab|vocabulary)_size(_.*)?|.*_vocab_size", VOCABULARY_SIZE),
    (r"pad_token_id", 0),
    (r"(bos|cls|decoder_start)_token_id", 1),
    (r"eos_token_id|sep_token_id", None),
    (r".*_token_(id|index)", VOCABULARY_SIZE - 1),
    (r".*drop.*", 0.0),
    (r"num_(hidden_)?layers|n_layers?|(num_)?(decoder|encoder)_layers|num_blocks", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_kv_shared_layers", 0),
    (r"n_group|topk_group|n_groups|mamba_n_groups|mamba_expand|expand|pretraining_tp", 1),
    (r"(.*_)?(kv_n_heads|num_(key_value|kv|k)_heads|n_head_kv|num_key_value_heads)", 2),
    (r"linear_num_key_heads|linear_num_value_heads|index_n_heads", 2),
    (r"(.*_)?(num_(attention_|query_|v_)?heads|n_heads?|attention_heads|num_heads)", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_topk", 4),
    (r"(.*_)?(head_dim|kv_channels|d_head|d_kv|dim_head|attention_head_size|value_dim)", 8),
    (r"(kv|q)_lora_rank|o_lora_rank|laurel_rank|hidden_size_per_layer_input|.*_rank", 8),
    (r"(.*_)?(d_state|state_size)", 8),
    (r"(.*_)?num_experts_per_tok(en)?|(moe_)?(top_k|topk|k)|num_selected_experts|moe_top_k", 2),
    (r"(.*_)?(num|n)_(local_|routed_|moe_)?experts|moe_num_experts|num_moe_experts", 4),
    (r"(n|num)_shared_experts", 1),
    (
        r".*(hidden_size|embedding_size|embed_dim|emb_dim)|d_model|n_embd|dim(_model)?|embedding_dim",
        32,
    ),
    (r"word_embed_proj_dim|lru_width|attention_dim|.*_hidden_dim|projection_dim|d_embed", 32),
    (r".*(intermediate_size|ffn_dim|ff_dim)|d_ff|n_inner|d_inner|dim_ff|feed_forward_size", 32),
    (r"ffn_hidden_size|.*_ffn_size|mlp_hidden_size", 32),
    (r".*(max_position|n_positions|max_seq_len|max_sequence_length|context_length).*", 64),
    (r"(sliding_window|.*window_size|attention_window|attention_chunk_size|chunk_size)", 16),
]

# What a single type needs in addition, where its keys depend on each other.
_OTHERS: Dict[str, Dict[str, Any]] = {
    "reformer": {
        "axial_pos_shape": [3, 6],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 9,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "modernbert-decoder": {"sep_token_id": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # It changes its weights when it is evaluated otherwise, which is an error at stages 1 to 3.
    "rwkv": {"rescale_every": 0},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
}


def shrunken(model_type: str) -> Dict[str, Any]:
    """
    # Returns

    `Dict[str, Any]`
        What `AutoConfig.for_model` takes.
    """
    config = CONFIG_MAPPING[model_type]()
    overrides = {**_shrink(config), **_OTHERS.get(model_type, {}), "model_type": model_type}
    for name in ("is_decoder", "causal"):
        if hasattr(config, name):
            overrides[name] = True
    return overrides


def _shrink(config: PreTrainedConfig) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    num_layers = next(
        (
            value
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
            if isinstance(value := getattr(config, name, None), int)
        ),
        None,
    )
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("id2label", "label2id"):
            continue
        if isinstance(value, PreTrainedConfig):
            values[name] = {**_shrink(value), "model_type": value.model_type}
        elif isinstance(value, (list, tuple)) and len(value) == num_layers:
            values[name] = _two_of(list(value))
        elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or value is None:
            small = _small(name, value)
            if small != value:
                values[name] = small
    if "kv_lora_rank" in vars(config):
        # Latent attention, whose rotary part is the whole head for the embedding of positions.
        latent = {"num_key_value_heads": 4, "head_dim": 4}
        values.update({name: value for name, value in latent.items() if name in values})
    return values


def _small(name: str, value: Any) -> Any:
    for pattern, small in _VALUES:
        if re.fullmatch(pattern, name):
            return small if value is not None or "token" in name else None
    return value


def _two_of(values: List[Any]) -> List[Any]:
    """Two layers of different kinds, if there are such."""
    others = [value for value in values if value != values[0]]
    return [values[0], others[0] if others else values[1]]
