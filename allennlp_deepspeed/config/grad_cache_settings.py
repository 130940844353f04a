import json
from typing import Any, Dict, List, Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.values import is_integer

AUTO = "auto"


class GradCacheSettings:
    """
    The trainer's `grad_cache`.

    # Parameters

    settings : `Dict[str, Any]`, required.
        With `"chunk_size"`: examples to encode at a time, on each rank. A number; a number for each
        argument of the model's `encode`, which is then called for one at a time, as in
        `{"query": 64, "document": 16}`; or `"auto"`, the largest number that fits. And, if wanted,
        `"trim_padding"`: whether chunks of a model that ignores padding are of texts of similar
        lengths, padded as far as these need, which is the default.

    # Raises

    `ConfigurationError`
        If it is anything else.
    """

    def __init__(self, settings: Dict[str, Any]) -> None:
        example = settings if _is_chunk_size(settings) else 32
        expected = f'write {{"chunk_size": {json.dumps(example)}}}.'
        if not isinstance(settings, dict):
            raise ConfigurationError(f"'trainer.grad_cache' is {json.dumps(settings)}: {expected}")
        for key in settings:
            if key == "negatives":
                raise ConfigurationError(
                    "'trainer.grad_cache.negatives' is given, but it is the model that needs to "
                    "know, without gradient caching too: move it to 'model.negatives'."
                )
            if key not in ("chunk_size", "trim_padding"):
                raise ConfigurationError(f"'trainer.grad_cache.{key}' is no key of it: {expected}")
        if "chunk_size" not in settings:
            raise ConfigurationError(f"'trainer.grad_cache' has no 'chunk_size': {expected}")
        self.chunk_size: Union[int, str, Dict[str, int]] = settings["chunk_size"]
        if not _is_chunk_size(self.chunk_size):
            raise ConfigurationError(
                f"'trainer.grad_cache.chunk_size' is {json.dumps(self.chunk_size)}: write a number "
                'of examples, at least 1, or one for each encoder, as {"query": 64, "document": '
                '16}, or "auto".'
            )
        self.trim_padding: bool = settings.get("trim_padding", True)
        if not isinstance(self.trim_padding, bool):
            raise ConfigurationError(
                f"'trainer.grad_cache.trim_padding' is {json.dumps(self.trim_padding)}: write "
                "true, for chunks of texts of similar lengths, padded as far as these need, or "
                "false, for chunks in the batch's order and with its padding."
            )

    @property
    def names(self) -> List[str]:
        """Arguments of `encode`, if they are chunked apart."""
        return list(self.chunk_size) if isinstance(self.chunk_size, dict) else []


def _is_chunk_size(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_size, value.values()))
    return value == AUTO or _is_size(value)


def _is_size(value: Any) -> bool:
    return is_integer(value) and value >= 1
