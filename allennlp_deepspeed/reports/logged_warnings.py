"""
Which logged warnings warn of something.
"""

import logging
import re

# What libraries log as warnings in every training, and nobody can do anything about.
_ROUTINE = {
    "allennlp.training.gradient_descent_trainer": (
        r"Worker \d+ completed its entire epoch \(validation\)\.",
        "You provided a validation dataset but patience was set to None",
    ),
    "allennlp.common.from_params": r"Parameter \w+ for class \w+ was found in both \*\*extras",
    "allennlp.data.vocabulary": "vocabulary serialization directory .* is not empty",
    "DeepSpeed": (
        r"\*+ You are using ZeRO with an untested optimizer",
        "Attempting to get learning rate from scheduler before it has started",
    ),
}


def is_routine(record: logging.LogRecord) -> bool:
    """Whether a warning is one that every training logs."""
    patterns = _ROUTINE.get(record.name, ())
    if isinstance(patterns, str):
        patterns = (patterns,)
    message = record.getMessage()
    return any(re.match(pattern, message) for pattern in patterns)
