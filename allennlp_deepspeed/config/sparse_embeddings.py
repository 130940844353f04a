"""
Keys of a model by which embeddings have sparse gradients.
"""

from typing import Any, Dict

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.json_types import values_in
from allennlp_deepspeed.config.settings import ResolvedConfig


def check_sparse_embeddings(model: Any, resolved: ResolvedConfig) -> None:
    """
    # Parameters

    model : `Any`, required.
        The "model" of a config.
    resolved : `ResolvedConfig`, required.

    # Raises

    `ConfigurationError`
        At ZeRO stages 1 to 3, with a line for each key that asks for sparse gradients.
    """
    if resolved.zero_stage == 0:
        return
    errors = ConfigErrors()
    for path, section in [("model", model), *values_in(model, "model")]:
        for key in ("sparse", "sparse_embeddings") if isinstance(section, dict) else ():
            if section.get(key) is True and _has_embedding(section, key):
                errors.add(
                    f"'{path}.{key}' is true, but DeepSpeed can't reduce sparse gradients at ZeRO "
                    f'stage {resolved.zero_stage}: write false, or "zero_optimization": '
                    '{"stage": 0}'
                )
    errors.raise_any()


def _has_embedding(section: Dict[str, Any], key: str) -> bool:
    """AllenNLP's `Embedding`, or a language model whose softmax is sampled."""
    if key == "sparse":
        return section.get("type", "embedding") == "embedding" and "embedding_dim" in section
    return section.get("num_samples") is not None
