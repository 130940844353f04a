"""
What objects of AllenNLP's registered names compute, as nested lists of numbers. Both environments
run it.
"""

from typing import Any, Callable, Dict, List, Tuple

import torch
from allennlp.common import Params, Registrable
from allennlp.data import Instance, Token, TokenIndexer, Tokenizer, Vocabulary
from allennlp.data.fields import TextField
from allennlp.data.samplers import BatchSampler
from allennlp.data.token_indexers import SingleIdTokenIndexer
from allennlp.modules import Attention, MatrixAttention, Seq2SeqEncoder, Seq2VecEncoder
from allennlp.modules.span_extractors import SpanExtractor
from allennlp.nn import Activation, Initializer
from allennlp.nn.regularizers import Regularizer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.metrics import Metric
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.optimizers import Optimizer

from evidence.model_library.experiments import replace_models_of_spacy, seed
from tests.support import metric_inputs
from tests.support.saved_tokenizers import TEXTS

BATCH_SIZE, LENGTH, WIDTH = 3, 5, 6

_COSINE = {"num_warmup_steps": 5, "num_training_steps": 24}
_STEP = {"type": "step", "step_size": 2, "gamma": 0.5}
_RECURRENT = {"input_size": WIDTH, "hidden_size": 4}
_CONVOLUTIONS = {"embedding_dim": WIDTH, "num_filters": 4, "ngram_filter_sizes": [2, 3]}
_VECTOR_AND_MATRIX = {"vector_dim": WIDTH, "matrix_dim": WIDTH}
_LINEAR = {"tensor_1_dim": WIDTH, "tensor_2_dim": WIDTH, "combination": "x,y,x*y"}
_SPANS = {"input_dim": WIDTH, "num_width_embeddings": 6, "span_width_embedding_dim": 2}
_FEEDFORWARD = {
    "input_dim": WIDTH,
    "num_layers": 2,
    "hidden_dims": 4,
    "activations": "relu",
}
# What a component is constructed with, if it has arguments without a default. By kind and name.
ARGUMENTS: Dict[Tuple[str, str], Dict[str, Any]] = {
    ("optimizer", "multi"): {
        "optimizers": {"default": {"type": "sgd", "lr": 0.1}, "adam": {"type": "adam"}},
        "parameter_groups": [[["bias"], {"optimizer_name": "adam"}]],
    },
    ("optimizer", "sgd"): {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    ("learning rate scheduler", "combined"): {
        "schedulers": [[4, _STEP], [4, {"type": "exponential", "gamma": 0.9}]]
    },
    ("learning rate scheduler", "constant_with_warmup"): {"num_warmup_steps": 5},
    ("learning rate scheduler", "cosine"): {"t_initial": 4},
    ("learning rate scheduler", "cosine_hard_restarts_with_warmup"): _COSINE,
    ("learning rate scheduler", "cosine_with_warmup"): _COSINE,
    ("learning rate scheduler", "exponential"): {"gamma": 0.9},
    ("learning rate scheduler", "linear_with_warmup"): {"warmup_steps": 5},
    ("learning rate scheduler", "multi_step"): {"milestones": [2, 5]},
    ("learning rate scheduler", "noam"): {"model_size": 16, "warmup_steps": 5},
    ("learning rate scheduler", "reduce_on_plateau"): {"patience": 1},
    ("learning rate scheduler", "step"): _STEP,
    ("momentum scheduler", "inverted_triangular"): {"cool_down": 3, "warm_up": 3},
    ("initializer", "block_orthogonal"): {"split_sizes": [4, 3]},
    ("initializer", "constant"): {"val": 0.5},
    ("initializer", "sparse"): {"sparsity": 0.5},
    ("batch sampler", "bucket"): {"batch_size": 4, "sorting_keys": ["tokens"]},
    ("batch sampler", "max_tokens_sampler"): {"max_tokens": 30, "sorting_keys": ["tokens"]},
    ("attention", "additive"): _VECTOR_AND_MATRIX,
    ("attention", "bilinear"): _VECTOR_AND_MATRIX,
    ("attention", "linear"): _LINEAR,
    ("attention", "scaled_dot_product"): {"scaling_factor": 2},
    ("matrix attention", "bilinear"): {"matrix_1_dim": WIDTH, "matrix_2_dim": WIDTH},
    ("matrix attention", "linear"): _LINEAR,
    ("encoder of sequences", "alternating_lstm"): {**_RECURRENT, "num_layers": 2},
    ("encoder of sequences", "augmented_lstm"): _RECURRENT,
    ("encoder of sequences", "compose"): {
        "encoders": [{"type": "lstm", **_RECURRENT}, {"type": "pass_through", "input_dim": 4}]
    },
    ("encoder of sequences", "feedforward"): {"feedforward": _FEEDFORWARD},
    ("encoder of sequences", "gated-cnn-encoder"): {
        "input_dim": WIDTH,
        "layers": [[[2, WIDTH]], [[3, WIDTH]]],
    },
    ("encoder of sequences", "gru"): _RECURRENT,
    ("encoder of sequences", "lstm"): {**_RECURRENT, "bidirectional": True},
    ("encoder of sequences", "pass_through"): {"input_dim": WIDTH},
    ("encoder of sequences", "pytorch_transformer"): {
        **{"input_dim": WIDTH, "num_layers": 2, "num_attention_heads": 2},
        "positional_encoding": "sinusoidal",
    },
    ("encoder of sequences", "rnn"): _RECURRENT,
    ("encoder of sequences", "stacked_bidirectional_lstm"): {**_RECURRENT, "num_layers": 2},
    ("encoder of vectors", "alternating_lstm"): {**_RECURRENT, "num_layers": 2},
    ("encoder of vectors", "bag_of_embeddings"): {"embedding_dim": WIDTH},
    ("encoder of vectors", "boe"): {"embedding_dim": WIDTH, "averaged": True},
    ("encoder of vectors", "cls_pooler"): {"embedding_dim": WIDTH},
    ("encoder of vectors", "cnn"): _CONVOLUTIONS,
    ("encoder of vectors", "cnn-highway"): {
        **{"embedding_dim": WIDTH, "filters": [[2, 4], [3, 4]], "num_highway": 1},
        **{"projection_dim": 4, "projection_location": "after_cnn", "do_layer_norm": True},
    },
    ("encoder of vectors", "gru"): _RECURRENT,
    ("encoder of vectors", "lstm"): {**_RECURRENT, "bidirectional": True},
    ("encoder of vectors", "rnn"): _RECURRENT,
    ("encoder of vectors", "stacked_bidirectional_lstm"): {**_RECURRENT, "num_layers": 2},
    ("span extractor", "bidirectional_endpoint"): _SPANS,
    ("span extractor", "endpoint"): {**_SPANS, "combination": "x,y,x*y"},
    ("span extractor", "max_pooling"): _SPANS,
    ("span extractor", "self_attentive"): _SPANS,
    ("token indexer", "characters"): {"min_padding_length": 3},
}
# They read a file: an archive, a transformer, a model of spaCy, or a program in C.
NOT_HERE = {
    ("encoder of vectors", "bert_pooler"),
    ("initializer", "pretrained"),
    ("metric", "evalb"),
    ("token indexer", "pretrained_transformer"),
    ("token indexer", "pretrained_transformer_mismatched"),
    ("token indexer", "spacy"),
    ("tokenizer", "pretrained_transformer"),
    # In 2022, too, it has no attribute `hidden_size`.
    ("encoder of vectors", "augmented_lstm"),
}


def _construct(kind: str, name: str, **extras: Any) -> Any:
    params = Params({"type": name, **ARGUMENTS.get((kind, name), {})}).duplicate()
    return KINDS[kind][0].from_params(params, **extras)


def _optimizer(kind: str, name: str) -> Any:
    """The weights after six steps, of which the gradients of some rows are sparse."""
    is_sparse = "sparse" in name
    table = torch.nn.Embedding(WIDTH, 4, sparse=is_sparse)
    bias = torch.nn.Parameter(torch.randn(4))
    named = [("matrix", table.weight), *([] if name == "sparse_adam" else [("bias", bias)])]
    optimizer = _construct(kind, name, model_parameters=named)
    for step in range(6):
        optimizer.zero_grad()
        rows = table(torch.tensor([step % 3, 4]))
        (rows + bias).pow(2).sum().backward()
        optimizer.step()
    return [parameter for _, parameter in named]


def _scheduler(kind: str, name: str) -> Any:
    key = "momentum" if kind == "momentum scheduler" else "lr"
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    extras = {} if key == "momentum" else {"num_epochs": 8, "num_steps_per_epoch": 3}
    scheduler = _construct(kind, name, optimizer=sgd, **extras)
    values = []
    for epoch in range(8):
        for batch in range(3):
            sgd.step()
            scheduler.step_batch(3 * epoch + batch)
            values.append(sgd.param_groups[0][key])
        scheduler.step(1.0)
        values.append(sgd.param_groups[0][key])
    return values


def _initializer(kind: str, name: str) -> Any:
    shapes = {"dirac": (4, 3, 3), "lstm_hidden_bias": (12,)}
    tensor = torch.zeros(shapes.get(name, (8, WIDTH)))
    initializer = _construct(kind, name)
    initializer(tensor, parameter_name="weight")
    return tensor


def _function(kind: str, name: str) -> Any:
    values = torch.linspace(-3, 3, 25, requires_grad=True)
    output = _construct(kind, name)(values)
    output.sum().backward()
    return [output, values.grad]


def _regularizer(kind: str, name: str) -> Any:
    return _construct(kind, name)(torch.linspace(-3, 3, 25))


def _batch_sampler(kind: str, name: str) -> Any:
    indexers = {"tokens": SingleIdTokenIndexer()}
    words = [Token("a")]
    instances = [
        Instance({"tokens": TextField(words * (1 + 7 * i % 11), indexers)}) for i in range(30)
    ]
    vocabulary = Vocabulary.from_instances(instances)
    for instance in instances:
        instance.index_fields(vocabulary)
    return [list(_construct(kind, name).get_batch_indices(instances)) for _ in range(2)]


def _metric(kind: str, name: str) -> Any:
    metric = metric_inputs.construct(name)
    values = []
    for step in metric_inputs.inputs(name):
        for batch in step:
            metric(*batch)
        values.append(metric.get_metric())
    return values


def _module(kind: str, name: str) -> Any:
    """The output, and gradients of inputs and parameters."""
    module = _construct(kind, name).eval()
    for _, parameter in module.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.5
    mask = torch.ones(BATCH_SIZE, LENGTH, dtype=torch.bool)
    mask[1, 3:] = False
    inputs = torch.randn(BATCH_SIZE, LENGTH, WIDTH, requires_grad=True)
    if kind == "attention":
        output = module(torch.randn(BATCH_SIZE, WIDTH), inputs, mask)
    elif kind == "matrix attention":
        output = module(inputs, torch.randn(BATCH_SIZE, 4, WIDTH))
    elif kind == "span extractor":
        output = module(inputs, torch.tensor([[[0, 2], [1, 1]]] * BATCH_SIZE), mask)
    else:
        output = module(inputs, mask)
    output.pow(2).sum().backward()
    return [output, inputs.grad, [parameter.grad for parameter in module.parameters()]]


def _tokenizer(kind: str, name: str) -> Any:
    replace_models_of_spacy()
    tokenizer = _construct(kind, name)
    return [[[each.text, each.idx] for each in tokenizer.tokenize(text)] for text in TEXTS]


def _token_indexer(kind: str, name: str) -> Any:
    indexer = _construct(kind, name)
    tokens = [[Token(word) for word in text.split()] for text in TEXTS]
    instances = [Instance({"tokens": TextField(each, {"tokens": indexer})}) for each in tokens]
    vocabulary = Vocabulary.from_instances(instances)
    return [indexer.tokens_to_indices(each, vocabulary) for each in tokens if each]


KINDS: Dict[str, Tuple[Any, Callable[[str, str], Any]]] = {
    "optimizer": (Optimizer, _optimizer),
    "learning rate scheduler": (LearningRateScheduler, _scheduler),
    "momentum scheduler": (MomentumScheduler, _scheduler),
    "initializer": (Initializer, _initializer),
    "activation": (Activation, _function),
    "regularizer": (Regularizer, _regularizer),
    "batch sampler": (BatchSampler, _batch_sampler),
    "metric": (Metric, _metric),
    "encoder of sequences": (Seq2SeqEncoder, _module),
    "encoder of vectors": (Seq2VecEncoder, _module),
    "attention": (Attention, _module),
    "matrix attention": (MatrixAttention, _module),
    "span extractor": (SpanExtractor, _module),
    "tokenizer": (Tokenizer, _tokenizer),
    "token indexer": (TokenIndexer, _token_indexer),
}


def names() -> List[Tuple[str, str]]:
    """The kinds and names that AllenNLP has registered."""
    found = []
    for kind, (base, _) in KINDS.items():
        registry = Registrable._registry[base]
        for name, (registered, _) in registry.items():
            if registered.__module__.startswith("allennlp.") and (kind, name) not in NOT_HERE:
                found.append((kind, name))
    return found


def output(kind: str, name: str) -> Any:
    seed(1)
    return KINDS[kind][1](kind, name)
