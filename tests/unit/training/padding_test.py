"""Parts of batches have the padding that their own texts need, with every indexer of AllenNLP."""

import copy
from typing import Any, Dict, List, Tuple

import pytest
import torch
from allennlp.common import Params
from allennlp.data import Batch, Instance, Token, TokenIndexer, Vocabulary
from allennlp.data.fields import Field, ListField, TextField
from allennlp.modules import TextFieldEmbedder

from allennlp_deepspeed.training.chunking import chunks_by_length
from allennlp_deepspeed.training.padding import TextLengths, longest_window
from tests.fixtures.tiny_bert import tiny_bert

# The fourth has no word.
TEXTS = ["name1 name2 rest1", "name1", "rest3 name2 verb1 rest1 name4 noun1 noun2", "", "noun7 a"]
LENGTHS = [len(text.split()) for text in TEXTS]

WORDS = ({"type": "single_id"}, {"type": "embedding", "embedding_dim": 3})
CHARACTERS = (
    {"type": "characters", "min_padding_length": 3},
    {
        "type": "character_encoding",
        "embedding": {"embedding_dim": 2, "vocab_namespace": "token_characters"},
        "encoder": {
            "type": "cnn",
            "embedding_dim": 2,
            "num_filters": 2,
            "ngram_filter_sizes": [2],
        },
    },
)


def _transformer(kind: str, **arguments: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    return {"type": kind, **arguments}, {"type": kind, **arguments}


# For each name of an indexer, it and the embedder of what it gives.
INDEXERS = {
    "words": {"tokens": WORDS},
    "words and characters": {"tokens": WORDS, "characters": CHARACTERS},
    "pieces": {"tokens": _transformer("pretrained_transformer")},
    "folded pieces": {"tokens": _transformer("pretrained_transformer", max_length=5)},
    "pieces of words": {
        "tokens": _transformer("pretrained_transformer_mismatched"),
        "words": WORDS,
    },
    "folded pieces of words": {
        "tokens": _transformer("pretrained_transformer_mismatched", max_length=5)
    },
}


@pytest.fixture(scope="module")
def model_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert(tmp_path_factory.mktemp("padding") / "tiny_bert")


def batch_and_embedder(
    indexers: Dict[str, Any], model_name: str, in_lists: bool
) -> Tuple[Dict[str, Any], TextFieldEmbedder]:
    of_model = {"model_name": model_name}
    constructed, embedders = {}, {}
    for name, (indexer, embedder) in indexers.items():
        extra = of_model if "pretrained" in indexer["type"] else {}
        constructed[name] = TokenIndexer.from_params(Params({**indexer, **extra}))
        embedders[name] = copy.deepcopy({**embedder, **extra})

    def field(text: str) -> Field:
        if not text and "max_length" in str(indexers):
            text = "noun3"  # AllenNLP's embedders can't fold a text without a token
        tokens = [Token(word) for word in text.split()]
        if "pretrained_transformer" in str(indexers) and "mismatched" not in str(indexers):
            tokens = [Token("[CLS]"), *tokens, Token("[SEP]")]
        text_field = TextField(tokens, constructed)
        shorter = TextField(tokens[:2], constructed)
        return ListField([text_field, shorter]) if in_lists else text_field

    instances = [Instance({"texts": field(text)}) for text in TEXTS]
    batch = Batch(instances)
    vocab = Vocabulary.from_instances(instances)
    batch.index_instances(vocab)
    embedder = TextFieldEmbedder.from_params(Params({"token_embedders": embedders}), vocab=vocab)
    return batch.as_tensor_dict(), embedder.eval()


@pytest.mark.parametrize(
    "name, in_lists",
    [
        *((name, False) for name in INDEXERS),
        # AllenNLP's embedders fold texts, and not lists of texts.
        *((name, True) for name in INDEXERS if "folded" not in name),
    ],
)
def test_texts_are_the_same_with_less_padding(model_name: str, name: str, in_lists: bool):
    inputs, embedder = batch_and_embedder(INDEXERS[name], model_name, in_lists)
    chunks = chunks_by_length(inputs, len(TEXTS), len(TEXTS), 2, 1)
    assert [chunk.rows.tolist() for chunk in chunks] == [[2, 0], [4, 1], [3]]
    arguments = {"num_wrapping_dims": 1} if in_lists else {}
    of_batch = embedder(inputs["texts"], **arguments)
    sizes = []
    for chunk in chunks:
        embedded = embedder(chunk.inputs["texts"], **arguments)
        sizes.append(embedded.size(-2))
        for of_chunk, row in zip(embedded, chunk.rows.tolist()):
            length = LENGTHS[row]
            # Of a list, the other text is shorter.
            torch.testing.assert_close(of_chunk[..., :length, :], of_batch[row][..., :length, :])
    assert sizes[0] == of_batch.size(-2) > sizes[1] > sizes[2] > 0


@pytest.mark.parametrize(
    "query, document, expected",
    [([4, 2], [6, 3], True), ([4, 2], [6, 4], False), ([4, 4], [6, 1], False)],
)
def test_each_field_has_a_text_that_is_padded_to_twice_its_length(
    query: List[int], document: List[int], expected: bool
):
    def field(lengths: List[int]) -> Any:
        rows = [[1] * length + [0] * (max(lengths) - length) for length in lengths]
        return {"tokens": {"tokens": torch.tensor(rows)}}

    inputs = {"query": field(query), "document": field(document)}
    assert TextLengths(inputs, 2).is_much_padded == expected
    assert not TextLengths({"numbers": torch.zeros(2, 3)}, 2).is_much_padded


def test_vectors_of_tokens_are_no_tokens():
    words = torch.tensor([[1, 2, 3], [4, 0, 0]])
    field = {"words": {"tokens": words}, "spacy": {"tokens": torch.ones(2, 3, 5)}}
    chunks = chunks_by_length({"text": field}, 2, 2, 1, 1)
    assert [chunk.inputs["text"]["words"]["tokens"].shape for chunk in chunks] == [(1, 3)] * 2


def test_what_is_no_known_text_is_left_as_it_is():
    numbers = torch.zeros(3, 7)
    inputs: Dict[str, Any] = {
        "numbers": numbers,
        "features": {"tokens": {"vectors": numbers}},
        "metadata": ["a", "b", "c"],
        "words": {"tokens": {"tokens": torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0]])}},
    }
    (first, second) = chunks_by_length(inputs, 3, 3, 2, 2)
    assert first.rows.tolist() == [0, 1] and second.rows.tolist() == [2]
    assert second.inputs["numbers"].shape == (1, 7)
    assert second.inputs["features"]["tokens"]["vectors"].shape == (1, 7)
    assert second.inputs["metadata"] == ["c"]
    # The least that was asked for.
    assert second.inputs["words"]["tokens"]["tokens"].tolist() == [[0, 0]]


def test_a_rank_with_fewer_examples_has_fillers():
    inputs = {"words": {"tokens": {"tokens": torch.tensor([[1, 2, 3], [4, 0, 0]])}}}
    chunks = chunks_by_length(inputs, 2, 5, 2, 1)
    assert [chunk.is_filler for chunk in chunks] == [False, True, True]
    assert [chunk.rows.tolist() for chunk in chunks[1:]] == [[1], [1]]


@pytest.mark.parametrize(
    "module, expected",
    [
        (torch.nn.Linear(2, 2), 1),
        (torch.nn.Conv1d(2, 2, kernel_size=5), 5),
        (torch.nn.Sequential(torch.nn.Conv1d(2, 2, kernel_size=3, dilation=4)), 9),
    ],
)
def test_convolutions_need_as_many_tokens_as_they_span(module: torch.nn.Module, expected: int):
    assert longest_window(module) == expected
