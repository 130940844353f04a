"""Inputs for every metric of `allennlp.training.metrics` and `allennlp.fairness`, by its name."""

from typing import Any, Callable, Dict, List, Tuple

import torch
from allennlp.data import Vocabulary
from allennlp.fairness import bias_metrics, fairness_metrics  # noqa: F401
from allennlp.training.metrics import Metric

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG"]
# Of each of two steps, of the first worker and of the second.
SIZES = [(4, 4), (5, 2)]

Inputs = Tuple[Any, ...]


def floats(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def integers(generator: torch.Generator, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator)


def masked(generator: torch.Generator, *shape: int) -> torch.Tensor:
    mask = torch.rand(*shape, generator=generator) < 0.8
    mask[..., 0] = True
    return mask


def classes(generator: torch.Generator, size: int) -> Inputs:
    logits = floats(generator, size, 5, 3)
    return logits, integers(generator, 3, size, 5), masked(generator, size, 5)


def multi_label(generator: torch.Generator, size: int) -> Inputs:
    return floats(generator, size, 4), integers(generator, 2, size, 4)


def values(generator: torch.Generator, size: int) -> Inputs:
    predictions = floats(generator, size, 3) + 2
    return predictions, floats(generator, size, 3), masked(generator, size, 3)


def tokens(generator: torch.Generator, size: int) -> Inputs:
    return integers(generator, 6, size, 7), integers(generator, 6, size, 7)


def labels(generator: torch.Generator, size: int) -> Inputs:
    """Predicted, gold and protected."""
    return (
        integers(generator, 3, size, 8),
        integers(generator, 3, size, 8),
        integers(generator, 2, size, 8),
        masked(generator, size, 8),
    )


def without_gold(generator: torch.Generator, size: int) -> Inputs:
    predicted, _, protected, mask = labels(generator, size)
    return predicted, protected, mask


LABELS = {"num_classes": 3, "num_protected_variable_labels": 2}

Generate = Callable[[torch.Generator, int], Inputs]

# By registered name: arguments, and inputs for a number of instances.
METRICS: Dict[str, Tuple[Dict[str, Any], Generate]] = {
    "association_without_ground_truth": ({**LABELS, "gap_type": "pairwise"}, without_gold),
    "attachment_scores": (
        {},
        lambda g, n: (
            *(integers(g, 3, n, 5) for _ in range(4)),
            masked(g, n, 5),
        ),
    ),
    "auc": ({}, lambda g, n: (floats(g, n), integers(g, 2, n), masked(g, n))),
    "average": ({}, lambda g, n: (floats(g, 1).item(),)),
    "bleu": ({"exclude_indices": {0}}, tokens),
    "boolean_accuracy": ({}, lambda g, n: (integers(g, 2, n, 2), integers(g, 2, n, 2))),
    "categorical_accuracy": ({"top_k": 2}, classes),
    "covariance": ({}, values),
    "entropy": ({}, lambda g, n: (floats(g, n, 3), masked(g, n))),
    "f1": ({"positive_label": 1}, classes),
    "fbeta": ({"average": "macro"}, classes),
    "fbeta_multi_label": ({"average": "micro"}, multi_label),
    "f1_multi_label": ({"average": "macro"}, multi_label),
    "fbeta_verbose": ({}, classes),
    "independence": ({**LABELS, "dist_metric": "wasserstein"}, without_gold),
    "mean_absolute_error": ({}, values),
    "nli": ({}, lambda g, n: (floats(g, n, 3).softmax(-1),)),
    "pearson_correlation": ({}, values),
    "perplexity": ({}, lambda g, n: (floats(g, 1).item(),)),
    "rouge": ({"exclude_indices": {0}}, tokens),
    "separation": (LABELS, labels),
    "sequence_accuracy": ({}, lambda g, n: (integers(g, 2, n, 3, 2), integers(g, 2, n, 2))),
    "span_f1": (
        {"tag_namespace": "labels"},
        lambda g, n: (floats(g, n, 6, len(TAGS)), integers(g, len(TAGS), n, 6), masked(g, n, 6)),
    ),
    "spearman_correlation": ({}, lambda g, n: (floats(g, n, 3), floats(g, n, 3))),
    "sufficiency": ({**LABELS, "dist_metric": "wasserstein"}, labels),
    "unigram_recall": ({}, lambda g, n: (integers(g, 5, n, 3, 4), integers(g, 5, n, 4))),
}


def construct(name: str) -> Metric:
    arguments = METRICS[name][0]
    if name == "span_f1":
        vocabulary = Vocabulary()
        for tag in TAGS:
            vocabulary.add_token_to_namespace(tag, "labels")
        arguments = {**arguments, "vocabulary": vocabulary}
    return Metric.by_name(name)(**arguments)


def inputs(name: str) -> List[List[Inputs]]:
    """By step and worker."""
    generator = torch.Generator().manual_seed(3)
    generate = METRICS[name][1]
    return [[generate(generator, size) for size in sizes] for sizes in SIZES]
