"""
The transformers that AllenNLP 2.10.1 can embed: their types, and the settings with which they are
small.
"""

from typing import Any, Dict, NamedTuple, Optional


class Architecture(NamedTuple):
    """
    # Parameters

    settings : `Dict[str, Any]`
        Keys of its config that aren't small by their name (`former.transformer`).
    sub_module : `Optional[str]`
        The part that is embedded.
    model_type : `Optional[str]`
        The type of the transformer, if there are several of it.
    num_tokens : `int`
        To which short texts are padded. None has more than 16.
    max_tokens : `Optional[int]`
        To which long texts are truncated. None has less than 5.
    """

    settings: Dict[str, Any] = {}
    sub_module: Optional[str] = None
    model_type: Optional[str] = None
    num_tokens: int = 0
    max_tokens: Optional[int] = None


_NO_EXTRA_POSITIONS = Architecture({"max_position_embeddings": 42})

ARCHITECTURES: Dict[str, Architecture] = {
    "albert": Architecture(),
    "bart": Architecture(),
    "bart-encoder": Architecture({}, "encoder", "bart"),
    "bert": Architecture(),
    "bert-generation": Architecture(),
    "big_bird": Architecture({"attention_type": "original_full"}),
    "bigbird_pegasus-encoder": Architecture(
        {"attention_type": "original_full"}, "encoder", "bigbird_pegasus"
    ),
    "blenderbot-encoder": Architecture({}, "encoder", "blenderbot"),
    "blenderbot-small-encoder": Architecture({}, "encoder", "blenderbot-small"),
    "bloom": Architecture({"hidden_size": 32, "n_head": 4, "n_layer": 2}),
    "camembert": _NO_EXTRA_POSITIONS,
    "canine": Architecture({"num_hash_buckets": 64}),
    "convbert": Architecture(),
    "ctrl": Architecture({"n_head": 4, "n_layer": 2, "dff": 32}),
    "data2vec-text": _NO_EXTRA_POSITIONS,
    "deberta": Architecture({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": Architecture({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "distilbert": Architecture(),
    "distilbert-sinusoidal": Architecture({"sinusoidal_pos_embds": True}, None, "distilbert"),
    "electra": Architecture(),
    "flaubert": Architecture({"pad_index": 0}),
    "funnel": Architecture(
        {
            **{"architectures": ["FunnelModel"], "block_sizes": [1, 1, 1]},
            **{"block_repeats": [1, 1, 1], "num_decoder_layers": 1},
        }
    ),
    "gpt2": Architecture({"n_head": 4, "n_layer": 2}),
    "gpt_neo": Architecture(
        {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2}
    ),
    "gpt_neox": Architecture({"rotary_pct": 0.5}),
    "gptj": Architecture({"n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    "layoutlm": Architecture(),
    "led-encoder": Architecture({"attention_window": [8, 8]}, "encoder", "led"),
    "longformer": Architecture({"attention_window": [8, 8], "max_position_embeddings": 42}),
    "longt5-encoder": Architecture({"local_radius": 4}, "encoder", "longt5"),
    "luke": Architecture({"entity_vocab_size": 20, "entity_emb_size": 16}),
    "m2m_100-encoder": Architecture({}, "encoder", "m2m_100"),
    "marian-encoder": Architecture(
        {"pad_token_id": 0, "decoder_vocab_size": 64}, "encoder", "marian"
    ),
    "mbart": Architecture(),
    "megatron-bert": Architecture(),
    "mobilebert": Architecture({"true_hidden_size": 32, "intra_bottleneck_size": 32}),
    "mpnet": _NO_EXTRA_POSITIONS,
    "mt5-encoder": Architecture({}, "encoder", "mt5"),
    # Those of the hub have as many landmarks.
    "nystromformer": Architecture({"num_landmarks": 16, "segment_means_seq_len": 16}),
    "nystromformer-landmarks": Architecture(
        {"num_landmarks": 4, "segment_means_seq_len": 16}, None, "nystromformer", num_tokens=16
    ),
    "openai-gpt": Architecture({"n_head": 4, "n_layer": 2}),
    "opt": Architecture({"word_embed_proj_dim": 32}),
    "pegasus-encoder": Architecture({}, "encoder", "pegasus"),
    "plbart": Architecture(),
    "prophetnet-encoder": Architecture({}, "encoder", "prophetnet"),
    "prophetnet-encoder-unpadded": Architecture({}, "encoder", "prophetnet", max_tokens=5),
    "reformer": Architecture(
        {
            **{"axial_pos_shape": [2, 8], "axial_pos_embds_dim": [8, 8]},
            **{"attn_layers": ["local", "local"], "local_attn_chunk_length": 8},
            # It puts out twice as many.
            **{"max_position_embeddings": 16, "hidden_size": 16},
        },
        num_tokens=16,
    ),
    "rembert": Architecture(),
    "roberta": _NO_EXTRA_POSITIONS,
    "roformer": Architecture(),
    "splinter": Architecture(),
    "squeezebert": Architecture(),
    "t5-encoder": Architecture({}, "encoder", "t5"),
    "visual_bert": Architecture(),
    # Positions begin after the padding token's ID, which is 1 in all that are published.
    "xglm": Architecture({"attention_heads": 4, "pad_token_id": 1}),
    "xlm": Architecture({"pad_index": 0, "pad_token_id": 0}),
    "xlm-roberta": _NO_EXTRA_POSITIONS,
    "xlm-roberta-xl": _NO_EXTRA_POSITIONS,
    "xlnet": Architecture(),
    "yoso": _NO_EXTRA_POSITIONS,
    "yoso-unpadded": Architecture({"max_position_embeddings": 42}, None, "yoso", max_tokens=5),
}
