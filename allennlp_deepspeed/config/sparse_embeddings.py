"""
Keys of a model by which embeddings have sparse gradients.
"""

from typing import Any, Dict, Iterator, Tuple

from allennlp_deepspeed.config.config_errors import ConfigErrors
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
    for path, section in _sections(model, "model"):
        for key in ("sparse", "sparse_embeddings"):
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


def _sections(value: Any, path: str) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """All objects in a value, with their paths."""
    if isinstance(value, dict):
        yield path, value
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else items:
        yield from _sections(each, f"{path}.{key}")
