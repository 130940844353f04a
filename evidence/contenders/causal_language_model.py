"""
A GPT-style language model of any size, and data for it.
"""

from typing import Dict, Iterable

import torch
from allennlp.data import DatasetReader, Instance, Vocabulary
from allennlp.data.fields import TensorField
from allennlp.models.model import Model
from typing_extensions import override

from allennlp_deepspeed import TrainingTraits


@DatasetReader.register("random_tokens")
class RandomTokens(DatasetReader):
    """
    Makes up texts of token ids; the path that it reads is their number.

    # Parameters

    vocab_size : `int`
    num_tokens : `int`
        In each text.
    """

    def __init__(self, vocab_size: int, num_tokens: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens

    @override
    def _read(self, file_path: str) -> Iterable[Instance]:
        for _ in range(int(file_path)):
            token_ids = torch.randint(self._vocab_size, (self._num_tokens,))
            yield Instance({"token_ids": TensorField(token_ids)})


@Model.register("causal_language_model")
class CausalLanguageModel(Model):
    """
    A transformer that predicts the next token, with the parameters of GPT-2: layers with the
    normalization first, learned positions, and the embedding as the output layer.

    # Parameters

    vocab : `Vocabulary`
        Not used: tokens come as ids.
    vocab_size : `int`
    num_tokens : `int`
        The most in a text.
    width : `int`
        Of the representation of a token.
    num_layers : `int`
    num_heads : `int`
    """

    training_traits = TrainingTraits(computes_in_weights_dtype=True)

    def __init__(
        self,
        vocab: Vocabulary,
        vocab_size: int,
        num_tokens: int,
        width: int,
        num_layers: int,
        num_heads: int,
        **kwargs,
    ) -> None:
        super().__init__(vocab, **kwargs)
        self._embedding = torch.nn.Embedding(vocab_size, width)
        # GPT-2's. With PyTorch's, the first losses are many times the logarithm of `vocab_size`.
        torch.nn.init.normal_(self._embedding.weight, std=0.02)
        self._positions = torch.nn.Embedding(num_tokens, width)
        # One by one: `TransformerEncoder` would copy a whole layer, which can't be done to one that
        # is constructed partitioned.
        self._layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width,
                num_heads,
                dim_feedforward=4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self._normalization = torch.nn.LayerNorm(width)
        # Tied.
        self._output = torch.nn.Linear(width, vocab_size, bias=False)
        self._output.weight = self._embedding.weight

    def forward(self, token_ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        # Shape: (batch_size, num_tokens)
        num_tokens = token_ids.size(1)
        positions = torch.arange(num_tokens, device=token_ids.device)
        # Shape: (batch_size, num_tokens, width)
        hidden = self._embedding(token_ids) + self._positions(positions)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            num_tokens, device=hidden.device, dtype=hidden.dtype
        )
        for layer in self._layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        # Shape: (batch_size, num_tokens, vocab_size)
        logits = self._output(self._normalization(hidden))
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), token_ids[:, 1:].flatten()
        )
        return {"loss": loss}
