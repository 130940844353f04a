import math
from dataclasses import replace
from typing import Any, Dict, List, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import TextFieldTensors, Vocabulary
from allennlp.models import Model
from allennlp.modules import Seq2VecEncoder, TextFieldEmbedder
from allennlp.nn import InitializerApplicator, RegularizerApplicator
from allennlp.nn.util import get_text_field_mask
from typing_extensions import override

from allennlp_deepspeed.models.contrastive.contrastive_model import ContrastiveModel
from allennlp_deepspeed.models.contrastive.in_batch_accuracy import InBatchAccuracy
from allennlp_deepspeed.models.contrastive.info_nce import InfoNCE, info_nce
from allennlp_deepspeed.models.contrastive.retrieval_metric import RetrievalMetric


@Model.register("bi_encoder")
class BiEncoder(ContrastiveModel):
    """
    Embeds queries and documents so that a query and its relevant documents have a large dot
    product. Takes the fields of the "text_pairs" reader.

    The training loss is InfoNCE: each query's document against all other documents of the global
    batch and the hard negatives of all queries. All documents that a query is paired with in the
    batch are its positives; a hard negative that is one of them is ignored. The validation metrics
    measure retrieval from all documents of the validation set.

    Registered as a `Model` with name "bi_encoder".

    # Parameters

    vocab : `Vocabulary`, required.
    text_field_embedder : `TextFieldEmbedder`, required.
    seq2vec_encoder : `Seq2VecEncoder`, required.
    document_text_field_embedder : `TextFieldEmbedder`, optional (default = `None`)
        `None` embeds documents and negatives with `text_field_embedder`.
    document_seq2vec_encoder : `Seq2VecEncoder`, optional (default = `None`)
        `None` encodes them with `seq2vec_encoder`. If both document modules are `None`, both sides
        share one encoder; if not, each side has its own projection.
    projection_dim : `int`, optional (default = `None`)
        The dimension of the representations, which a linear layer after the encoder projects to.
        `None` means no projection.
    dropout : `float`, optional (default = `0.0`)
        Dropout probability on the embedded tokens.
    normalize : `bool`, optional (default = `True`)
        Whether to scale representations to unit length, so that dot products are cosines.
    temperature : `float`, optional (default = `0.05`)
        Temperature of the softmax over similarities.
    learn_temperature : `bool`, optional (default = `False`)
        Whether the temperature is trainable, with `temperature` as its initial value.
    bidirectional : `bool`, optional (default = `False`)
        If `True`, the loss is the mean of both directions: InfoNCE of each query against documents
        and of each document against queries.
    matryoshka_dims : `List[int]`, optional (default = `None`)
        The loss is the sum of the losses of the first `n` dimensions of the representations, for
        each of these numbers ([Kusupati et al., 2022](https://arxiv.org/abs/2205.13147)). With
        `normalize` the truncated representations are scaled to unit length again. All dimensions
        are trained together only if the list has their number. `None` means all dimensions.
    matryoshka_weights : `List[float]`, optional (default = `None`)
        The weights of these losses, in the same order. `None` means 1 for each.
    negatives : `str`, optional (default = `"global"`)
        As in `ContrastiveModel`.
    recall_at : `List[int]`, optional (default = `[1, 10, 100]`)
        The values of k for the metrics "recall@k". The other metrics are "mrr@10" and "ndcg@10".
    initializer : `InitializerApplicator`, optional
    regularizer : `RegularizerApplicator`, optional (default = `None`)
    """

    training_traits = replace(ContrastiveModel.training_traits, validates_whole_set=True)
    divides_loss = True
    default_predictor = "text_embedder"

    def __init__(
        self,
        vocab: Vocabulary,
        text_field_embedder: TextFieldEmbedder,
        seq2vec_encoder: Seq2VecEncoder,
        document_text_field_embedder: Optional[TextFieldEmbedder] = None,
        document_seq2vec_encoder: Optional[Seq2VecEncoder] = None,
        projection_dim: Optional[int] = None,
        dropout: float = 0.0,
        normalize: bool = True,
        temperature: float = 0.05,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        matryoshka_dims: Optional[List[int]] = None,
        matryoshka_weights: Optional[List[float]] = None,
        negatives: str = "global",
        recall_at: Optional[List[int]] = None,
        initializer: InitializerApplicator = InitializerApplicator(),
        regularizer: Optional[RegularizerApplicator] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocab, negatives, regularizer, **kwargs)
        if temperature <= 0:
            raise ConfigurationError(
                f"'model.temperature' is {temperature}: must be above 0, 0.05 for example."
            )
        self._query_encoder = TextEncoder(
            text_field_embedder, seq2vec_encoder, projection_dim, dropout, normalize
        )
        self._document_encoder: Optional[TextEncoder] = None
        if document_text_field_embedder is not None or document_seq2vec_encoder is not None:
            self._document_encoder = TextEncoder(
                document_text_field_embedder or text_field_embedder,
                document_seq2vec_encoder or seq2vec_encoder,
                projection_dim,
                dropout,
                normalize,
            )
            dims = [e.get_output_dim() for e in (self._query_encoder, self._document_encoder)]
            if dims[0] != dims[1]:
                raise ConfigurationError(
                    f"Queries have {dims[0]} dimensions and documents {dims[1]}: write "
                    "'model.projection_dim', or use encoders with the same output dimension."
                )
        self._normalize = normalize
        self._matryoshka = _matryoshka(
            self._query_encoder.get_output_dim(), matryoshka_dims, matryoshka_weights
        )
        # The parameter is a logarithm, so that no step can make the temperature negative.
        log_scale = torch.tensor([-math.log(temperature)])
        self._log_scale = torch.nn.Parameter(log_scale, requires_grad=learn_temperature)
        self._bidirectional = bidirectional
        self._in_batch_accuracy = InBatchAccuracy()
        self._retrieval = RetrievalMetric(recall_at)
        initializer(self)

    @override
    def forward(self, **inputs: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        """
        Computes the loss if both a query and a document are given, and else, for prediction, the
        representations of the given side.

        # Parameters

        inputs : `Any`
            The arguments of `encode` and of `contrastive_loss`.
        """
        if "query" in inputs and "document" in inputs:
            return super().forward(**inputs)
        return self.encode(**self.encoder_inputs(inputs))

    @override
    def encode(  # type: ignore[override]
        self,
        query: Optional[TextFieldTensors] = None,
        document: Optional[TextFieldTensors] = None,
        negatives: Optional[TextFieldTensors] = None,
    ) -> Dict[str, torch.Tensor]:
        """
        Encodes each text by itself.

        # Parameters

        query : `TextFieldTensors`, optional (default = `None`)
            Of shape (batch_size, num_tokens).
        document : `TextFieldTensors`, optional (default = `None`)
            Of shape (batch_size, num_tokens).
        negatives : `TextFieldTensors`, optional (default = `None`)
            Of shape (batch_size, num_negatives, num_tokens).

        # Returns

        `Dict[str, torch.Tensor]`
            Representations under the same names: "query" and "document" of shape (batch_size, dim),
            "negatives" of shape (batch_size, num_negatives, dim).
        """
        document_encoder = self._document_encoder or self._query_encoder
        representations = {}
        if query is not None:
            representations["query"] = self._query_encoder(query)
        if document is not None:
            representations["document"] = document_encoder(document)
        if negatives is not None:
            num_lists, num_texts, _ = get_text_field_mask(negatives, num_wrapping_dims=1).shape
            # From (batch_size, num_texts, ...) to (batch_size * num_texts, num_tokens).
            encoded = document_encoder(
                {
                    indexer: {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
                    for indexer, tensors in negatives.items()
                }
            )
            representations["negatives"] = encoded.view(num_lists, num_texts, -1)
        return representations

    @override
    def contrastive_loss(  # type: ignore[override]
        self,
        representations: Dict[str, torch.Tensor],
        query_id: Optional[torch.Tensor] = None,
        document_id: Optional[torch.Tensor] = None,
        negative_ids: Optional[torch.Tensor] = None,
        rows: Optional[slice] = None,
    ) -> Dict[str, torch.Tensor]:
        """
        Computes InfoNCE of the representations and updates the metrics.

        # Parameters

        representations : `Dict[str, torch.Tensor]`, required.
            As `encode` returns them.
        query_id : `torch.Tensor`, optional (default = `None`)
            Shape (batch_size,), equal for equal queries. If `None`, all queries are different.
            Required in evaluation.
        document_id : `torch.Tensor`, optional (default = `None`)
            Shape (batch_size,), equal for equal documents. If `None`, all documents are different.
            Required in evaluation.
        negative_ids : `torch.Tensor`, optional (default = `None`)
            Document ids of shape (batch_size, num_negatives), 0 where there is no negative.
            Required with negatives.
        rows : `slice`, optional (default = `None`)
            The examples whose part of the loss is computed. `None` means all.

        # Returns

        `Dict[str, torch.Tensor]`
            With a scalar "loss".

        # Raises

        `ConfigurationError`
            In evaluation, if an id is missing.
        """
        queries, documents = representations["query"], representations["document"]
        if not self.training and (query_id is None or document_id is None):
            raise ConfigurationError(
                "Retrieval metrics need the ids of queries and documents: the instances must have "
                "the fields 'query_id' and 'document_id', as those of the reader \"text_pairs\"."
            )
        indices = torch.arange(len(queries), device=queries.device)
        pairs = Pairs(
            indices if query_id is None else query_id,
            indices if document_id is None else document_id,
            None if negative_ids is None else negative_ids.flatten(),
        )
        candidates = documents
        if negative_ids is not None:
            candidates = torch.cat([documents, representations["negatives"].flatten(0, 1)])
        results = [
            self._info_nce(
                self._truncate(queries, dim), self._truncate(candidates, dim), pairs, rows
            )
            for dim, _ in self._matryoshka
        ]
        if self.training:
            self._in_batch_accuracy(results[0].num_correct, len(indices[rows or slice(None)]))
        else:
            self._retrieval(queries, documents, pairs.query_ids, pairs.document_ids)
        losses = [weight * result.loss for (_, weight), result in zip(self._matryoshka, results)]
        return {"loss": torch.stack(losses).sum()}

    def _info_nce(
        self,
        queries: torch.Tensor,
        candidates: torch.Tensor,
        pairs: "Pairs",
        rows: Optional[slice],
    ) -> InfoNCE:
        """Computes the loss of queries and candidates, which are documents and then negatives."""
        scale = self._log_scale.exp()[0]
        result = info_nce(queries, candidates, scale, pairs.relate_query, rows)
        if not self._bidirectional:
            return result
        documents = candidates[: len(queries)]
        backwards = info_nce(documents, queries, scale, pairs.relate_document, rows)
        return result._replace(loss=(result.loss + backwards.loss) / 2)

    def _truncate(self, vectors: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the first dimensions of vectors, of unit length if the vectors are."""
        if dim == self._query_encoder.get_output_dim():
            return vectors
        vectors = vectors[..., :dim].float()
        return torch.nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors

    @override
    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        """Returns the metrics of the epoch so far. With `reset`, every rank must call it."""
        return {
            **self._in_batch_accuracy.get_metric(reset),
            **self._retrieval.get_metric(reset),
        }


class Pairs:
    """
    Relates the queries and documents of a batch: they belong together if a pair has both ids.

    # Parameters

    query_ids : `torch.Tensor`, required.
        Of shape (batch_size,).
    document_ids : `torch.Tensor`, required.
        Of shape (batch_size,).
    negative_ids : `torch.Tensor`, optional (default = `None`)
        Of documents, of shape (num_negatives,), 0 where there is none.
    """

    def __init__(
        self,
        query_ids: torch.Tensor,
        document_ids: torch.Tensor,
        negative_ids: Optional[torch.Tensor] = None,
    ) -> None:
        self.query_ids = query_ids
        self.document_ids = document_ids
        self._queries = _first_indices(query_ids, query_ids)
        self._documents = _first_indices(document_ids, document_ids)
        self._negative_ids = negative_ids
        if negative_ids is not None:
            self._negatives = _first_indices(negative_ids, document_ids)

    def relate_query(self, start: int, stop: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the `Relation` of queries to documents followed by negatives."""
        belongs = _any_in_group(self.query_ids[start:stop, None] == self.query_ids, self._documents)
        is_positive = belongs[:, self._documents]
        is_left_out = torch.zeros_like(is_positive)
        if self._negative_ids is None:
            return is_positive, is_left_out
        is_document = self.document_ids[self._negatives] == self._negative_ids
        is_no_negative = (belongs[:, self._negatives] & is_document) | (self._negative_ids == 0)
        return (
            torch.cat([is_positive, torch.zeros_like(is_no_negative)], dim=1),
            torch.cat([is_left_out, is_no_negative], dim=1),
        )

    def relate_document(self, start: int, stop: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the `Relation` of documents to queries."""
        same_document = self.document_ids[start:stop, None] == self.document_ids
        is_positive = _any_in_group(same_document, self._queries)[:, self._queries]
        return is_positive, torch.zeros_like(is_positive)


def _matryoshka(
    output_dim: int, dims: Optional[List[int]], weights: Optional[List[float]]
) -> List[Tuple[int, float]]:
    """
    Returns the numbers of dimensions with their weights, the largest number first.

    # Raises

    `ConfigurationError`
        If a number is out of range or a weight is missing.
    """
    dims = [output_dim] if dims is None else dims
    if not dims or len(set(dims)) < len(dims) or not 1 <= min(dims) <= max(dims) <= output_dim:
        raise ConfigurationError(
            f"'model.matryoshka_dims' is {dims}: write different numbers from 1 to {output_dim}, "
            f"the dimension of the representations, such as {[output_dim, output_dim // 2]}."
        )
    weights = [1.0] * len(dims) if weights is None else weights
    if len(weights) != len(dims) or min(weights) <= 0:
        raise ConfigurationError(
            f"'model.matryoshka_weights' is {weights}: write a number above 0 for each number of "
            f"'model.matryoshka_dims', which is {dims}."
        )
    return sorted(zip(dims, weights), reverse=True)


def _first_indices(ids: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """
    Returns for each id the index of an equal element of `among`, the same index for equal ids, and
    any index if there is none.
    """
    ordered, order = among.sort(stable=True)
    return order[torch.searchsorted(ordered, ids).clamp_(max=len(among) - 1)]


def _any_in_group(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """
    Returns for each row and column whether any column of that column's group is true in the row.
    """
    counts = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    return counts.index_add_(1, groups, rows.float()) > 0


class TextEncoder(torch.nn.Module):
    """
    Encodes one side of a bi-encoder: a vector for each text.

    # Parameters

    text_field_embedder : `TextFieldEmbedder`, required.
    seq2vec_encoder : `Seq2VecEncoder`, required.
    projection_dim : `int`, optional (default = `None`)
        The output dimension of a linear layer after the encoder. `None` means no such layer.
    dropout : `float`, optional (default = `0.0`)
        Dropout probability on the embedded tokens.
    normalize : `bool`, optional (default = `True`)
        Whether to scale vectors to unit length.
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

    @override
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
    """Returns the mask of shape (num_texts, num_tokens)."""
    mask = get_text_field_mask(texts).clone()  # the mask may be the indexer's own tensor
    # Texts without tokens pad lists, and encoders divide by lengths or take a maximum.
    mask[:, 0] |= ~mask.any(dim=-1)
    return mask
