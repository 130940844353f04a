"""
What is constructed partitioned over two workers has the values of the same constructors without it.
"""

from copy import deepcopy
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import pytest
import torch
from allennlp.common import Params, cached_transformers
from allennlp.data import Vocabulary
from allennlp.modules import Embedding, Highway, TokenEmbedder
from allennlp.modules.seq2seq_encoders import PytorchTransformer
from allennlp.modules.token_embedders import PretrainedTransformerEmbedder
from allennlp.nn import InitializerApplicator
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.zero3 import partitioned_construction
from allennlp_deepspeed.engine.zero3.partitioned_construction import PartitionedConstruction
from tests.support.tensor_memory import TensorMemory
from tests.support.workers import run_workers

ZERO_3: Dict[str, Any] = {"zero_optimization": {"stage": 3}}
WORLD_SIZE = 2
CPU = torch.device("cpu")


class Tied(nn.Module):
    """An output layer that shares its weight with the embedding, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(8, num_embeddings=11)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


class LateComer(nn.Module):
    """Adds parameters to layers that have been constructed before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(20)])
        self.normalized = nn.utils.weight_norm(nn.Linear(5, 3))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
            layer.scale = nn.Parameter(layer.weight.data.norm(dim=0))
        self.layers.apply(self._shift)

    def _shift(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.add_(torch.rand(1))


class Siamese(nn.Module):
    """Two layers that begin with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.LSTM(3, 4)
        self.right = nn.LSTM(3, 4)
        self.right.load_state_dict(self.left.state_dict())


def _initialized() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 5), nn.LSTM(5, 4), nn.Linear(4, 3))
    initializer = InitializerApplicator.from_params(
        Params(
            {
                "regexes": [
                    ["1.weight_hh.*", "orthogonal"],
                    ["1.bias.*", "lstm_hidden_bias"],
                    ["2.weight", {"type": "uniform", "a": 2, "b": 3}],
                ]
            }
        )
    )
    initializer(module)
    return module


def _extended_vocabulary() -> nn.Module:
    vocab = Vocabulary()
    vocab.add_tokens_to_namespace(["a", "b"], "tokens")
    module = nn.Sequential(Embedding(4, vocab=vocab), nn.Linear(4, 2))
    vocab.add_tokens_to_namespace(["c", "d", "e"], "tokens")
    module[0].extend_vocab(vocab)
    return module


CONSTRUCTORS: Dict[str, Callable[[], nn.Module]] = {
    "biases that a module sets in its layers": lambda: Highway(6, num_layers=3),
    "deep copies of a layer": lambda: PytorchTransformer(
        8, 3, 12, 2, positional_encoding="embedding"
    ),
    "tied weights and a buffer": Tied,
    "parameters that come late": LateComer,
    "the state dict of another module": Siamese,
    "initializers of AllenNLP": _initialized,
    "an embedding that grows with the vocabulary": _extended_vocabulary,
    "a deep copy of everything": lambda: deepcopy(nn.ModuleList([Tied(), Highway(4)])),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_values_are_those_of_plain_construction(name: str) -> None:
    _assert_constructs_the_same(CONSTRUCTORS[name])


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    """A directory with a small BERT whose tokenizer has one token more than it has embeddings."""
    directory = tmp_path_factory.mktemp("bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (directory / "vocab.txt").write_text("\n".join(tokens))
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokens) - 1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
    )
    # Without the pooler, so that loading draws random numbers for it.
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)
    return str(directory)


def test_pretrained_transformers_load_into_partitioned_embedders(bert: str) -> None:
    def constructor() -> nn.Module:
        return nn.ModuleList(
            [
                PretrainedTransformerEmbedder(bert),
                nn.Linear(2, 2),
                PretrainedTransformerEmbedder(bert, train_parameters=False),
                PretrainedTransformerEmbedder(bert, reinit_modules=1, last_layer_only=False),
                cached_transformers.get(bert, make_copy=False),
                PretrainedTransformerEmbedder(bert, load_weights=False),
            ]
        )

    with mock.patch.dict(cached_transformers._model_cache, clear=True):
        _assert_constructs_the_same(constructor)


def test_adapters_begin_as_they_do_without(bert: str) -> None:
    inner = {"type": "pretrained_transformer", "model_name": bert}
    lora = {"type": "lora", "embedder": inner, "r": 2}

    def constructor() -> nn.Module:
        return nn.ModuleList([TokenEmbedder.from_params(Params(deepcopy(lora))) for _ in range(2)])

    with mock.patch.dict(cached_transformers._model_cache, clear=True):
        _assert_constructs_the_same(constructor)


def test_no_rank_holds_more_than_its_share_and_a_few_layers(bert: str) -> None:
    def construct(rank: int) -> Tuple[int, int]:
        few_elements = mock.patch.object(partitioned_construction, "MAX_UNSHARDED_ELEMENTS", 50_000)
        with few_elements, process_environment(CPU, rank), TensorMemory() as memory:
            module = _partitioned(_large_transformer)
        return memory.peak, 4 * sum(p.ds_numel for p in module.parameters())

    for peak, num_bytes in run_workers(WORLD_SIZE, construct):
        num_layers = 24
        assert peak < num_bytes / WORLD_SIZE + 4 * num_bytes / num_layers


def _large_transformer() -> nn.Module:
    return AutoModel.from_config(
        BertConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=24,
            num_attention_heads=2,
            intermediate_size=256,
        )
    )


def _assert_constructs_the_same(constructor: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    expected = constructor().state_dict()
    next_random = torch.rand(1)

    def construct(rank: int) -> List[str]:
        torch.manual_seed(1)
        with process_environment(CPU, rank):
            module = _partitioned(constructor)
            assert torch.equal(torch.rand(1), next_random)
            assert all(is_zero_param(p) and p.numel() == 0 for p in module.parameters())
            actual = _whole_state_dict(module)
        assert actual.keys() == expected.keys()
        return [key for key in expected if not torch.equal(actual[key], expected[key])]

    assert run_workers(WORLD_SIZE, construct) == [[], []]


def _partitioned(constructor: Callable[[], nn.Module]) -> nn.Module:
    with PartitionedConstruction(ZERO_3, CPU, local_rank=0) as construction:
        module = constructor()
        construction.finish(module)
    return module


def _whole_state_dict(module: nn.Module) -> Dict[str, torch.Tensor]:
    with zero.GatheredParameters(list(module.parameters())):
        return {key: value.clone() for key, value in module.state_dict().items()}
