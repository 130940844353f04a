"""Checks a model's attention by changing tokens that a position must not attend to."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.engine.zero3.prefetch_traces import untraced_pass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The length of an example, above the kernel size of the convolutions that some models have.
_LENGTH = 6


@torch.compiler.disable
@torch.no_grad()
def check_attention(
    module: torch.nn.Module,
    transformer: "PreTrainedModel",
    is_packed: bool,
    device: torch.device,
) -> None:
    """
    Checks that positions don't depend on later tokens or on other packed examples. Every rank must
    call it, because ZeRO stage 3 gathers weights.

    # Parameters

    module : `torch.nn.Module`, required.
        The transformer, or the part of it that computes hidden states.
    transformer : `PreTrainedModel`, required.
    is_packed : `bool`, required.
        Whether positions restart with each example.
    device : `torch.device`, required.
        Of the inputs. Not read from a weight: ZeRO stage 3 would gather it in each later forward
        pass of the module that reads it.

    # Raises

    `ConfigurationError`
        If a position depends on tokens after it, or on another example.
    """
    with _evaluation_mode(transformer), untraced_pass():
        # Two examples of ordinary tokens. Shape: (1, 2 * _LENGTH)
        config = transformer.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary_size = int(config.vocab_size)
        places = torch.arange(2 * _LENGTH, device=device)
        ids = (vocabulary_size // 2 + places)[None] % vocabulary_size
        expected = _states(module, ids, is_packed)
        changed = ids.clone()
        changed[:, -1] = ids[:, 0]
        if not _is_same(_states(module, changed, is_packed)[:, :-1], expected[:, :-1]):
            raise ConfigurationError(
                f"'model.type' is \"causal_lm\", but {type(transformer).__name__} isn't causal: "
                'use another model, or a causal configuration of it, such as "is_decoder": true '
                "if it has that key."
            )
        if is_packed:
            changed = ids.clone()
            changed[:, :_LENGTH] = ids[:, _LENGTH:]
            if not _is_same(_states(module, changed, True)[:, _LENGTH:], expected[:, _LENGTH:]):
                raise ConfigurationError(
                    f"'dataset_reader.pack' is true, but in {type(transformer).__name__} packed "
                    'examples attend to each other: write "pack": false, or use another model.'
                )


def _states(module: torch.nn.Module, ids: torch.Tensor, is_packed: bool) -> torch.Tensor:
    """Returns hidden states or logits of shape (1, 2 * _LENGTH, ...)."""
    inputs: Any = {"input_ids": ids, "use_cache": False}
    if is_packed:
        inputs["position_ids"] = torch.arange(_LENGTH, device=ids.device).repeat(2)[None]
    outputs = module(**inputs)
    states = getattr(outputs, "last_hidden_state", None)
    return outputs.logits if states is None else states


def _is_same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    precision = 1e-4 if expected.dtype == torch.float32 else 1e-2
    difference = (actual.float() - expected.float()).abs().max()
    return bool(difference <= precision * expected.float().abs().max())


@contextmanager
def _evaluation_mode(transformer: "PreTrainedModel") -> Iterator[None]:
    """Context manager that disables dropout."""
    training = [module for module in transformer.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
