from typing import Optional

import torch
from allennlp.data import TextFieldTensors
from allennlp.modules import Seq2VecEncoder, TextFieldEmbedder
from allennlp.nn.util import get_text_field_mask


class TextEncoder(torch.nn.Module):
    """
    One side of a bi-encoder: a vector for each text.

    # Parameters

    text_field_embedder : `TextFieldEmbedder`, required.
    seq2vec_encoder : `Seq2VecEncoder`, required.
    projection_dim : `int`, optional (default = `None`)
        If given, a linear layer follows, with as many outputs.
    dropout : `float`, optional (default = `0.0`)
        Of the embedded tokens.
    normalize : `bool`, optional (default = `True`)
        Whether vectors are scaled to a length of 1.
    """

    def __init__(
        self,
        text_field_embedder: TextFieldEmbedder,
        seq2vec_encoder: Seq2VecEncoder,
        projection_dim: Optional[int] = None,
        dropout: float = 0.0,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self._text_field_embedder = text_field_embedder
        self._seq2vec_encoder = seq2vec_encoder
        self._dropout = torch.nn.Dropout(dropout)
        self._projection: Optional[torch.nn.Linear] = None
        self._output_dim = seq2vec_encoder.get_output_dim()
        if projection_dim is not None:
            self._projection = torch.nn.Linear(self._output_dim, projection_dim)
            self._output_dim = projection_dim
        self._normalize = normalize

    def get_output_dim(self) -> int:
        return self._output_dim

    def forward(self, texts: TextFieldTensors) -> torch.Tensor:
        """
        # Parameters

        texts : `TextFieldTensors`
            Of shape (num_texts, num_tokens).

        # Returns

        `torch.Tensor`
            Of shape (num_texts, output_dim).
        """
        # Shape: (num_texts, num_tokens, embedding_dim)
        embedded = self._dropout(self._text_field_embedder(texts))
        vectors = self._seq2vec_encoder(embedded, mask=_mask(texts))
        if self._projection is not None:
            vectors = self._projection(vectors)
        if self._normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors


def _mask(texts: TextFieldTensors) -> torch.Tensor:
    """
    Of shape (num_texts, num_tokens). A text without any token, as those are that lists are padded
    with, has its first: encoders divide by lengths, or take a maximum.
    """
    mask = get_text_field_mask(texts).clone()  # it may be the indexer's
    mask[:, 0] |= ~mask.any(dim=-1)
    return mask
