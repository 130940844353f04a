"""
Runs the model of a config on a few instances, on the CPU with random weights: shows sizes that
don't fit together, and the names of metrics.
"""

import itertools
import re
import traceback
from typing import Any, Dict, Optional, Set

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, Vocabulary
from allennlp.nn.util import move_to_device

from allennlp_deepspeed.commands.trial import in_a_line
from allennlp_deepspeed.config.schema_validation import lookup
from allennlp_deepspeed.engine.process.random_states import random_states, set_random_states
from allennlp_deepspeed.launch import construction_errors
from allennlp_deepspeed.meta_model import construct_without_weights

MAX_PARAMETERS = 150_000_000
"""The size of a model whose forward pass takes seconds."""

_NUM_INSTANCES = 2

_CPU = torch.device("cpu")

# Errors that another random weight can't avoid.
_OF_SIZES = re.compile(r"size|shape|dimension|channels|out of (range|bounds)", re.I)
_FEATURES = [
    re.compile(r"shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<expected>\d+)x"),
    re.compile(r"to have (?P<expected>\d+) channels, but got (?P<given>\d+)"),
    re.compile(r"Expected (?P<expected>\d+), got (?P<given>\d+)"),
]
_OF_ARGUMENTS = re.compile(r"forward\(\) (got an unexpected|missing)")


class ForwardPass:
    """
    # Parameters

    params : `Params`, required.
        A complete training configuration that has been checked. It is not changed.
    vocabulary : `Vocabulary`, required.
    serialization_dir : `str`, required.
    """

    def __init__(self, params: Params, vocabulary: Vocabulary, serialization_dir: str) -> None:
        self._config = params.as_dict(quiet=True)
        with torch.random.fork_rng(devices=[]):
            self._model = construct_without_weights(
                params, vocabulary, serialization_dir, on_meta_device=False
            )

    def train(self, loader: DataLoader) -> None:
        """
        Runs the forward pass of a training.

        # Raises

        `ConfigurationError`
            If the model returns no loss. Otherwise what the model raises.
        """
        self._model.train()
        if "loss" not in self._run(loader):
            raise ConfigurationError("'model' returns no \"loss\" for the training data")

    def metrics(self, loader: DataLoader) -> Set[str]:
        """Returns the names of the metrics of a validation."""
        self._model.eval()
        with torch.no_grad():
            self._run(loader)
        return {*self._model.get_metrics(reset=True), "loss"}

    def _run(self, loader: Any) -> Dict[str, Any]:
        outputs: Dict[str, Any]
        states = random_states()
        # A command that is repeated says the same: the loader may shuffle.
        prepare_environment(Params({}))
        try:
            first = list(itertools.islice(loader.iter_instances(), _NUM_INSTANCES))
            outputs = self._model(**move_to_device(loader.collate_fn(first), _CPU))
        except Exception:
            # The model may need a batch of the loader's size.
            outputs = self._model(**move_to_device(next(iter(loader)), _CPU))
        finally:
            set_random_states(states)
        return outputs

    def describe(self, error: Exception) -> Optional[str]:
        """Describes an error that a training would have, too. `None` for any other error."""
        text = str(error)
        pattern = _OF_ARGUMENTS if isinstance(error, TypeError) else _OF_SIZES
        if not isinstance(error, ConfigurationError) and not (
            isinstance(error, (TypeError, RuntimeError, IndexError, ValueError))
            and pattern.search(text)
        ):
            return None
        path = self._path(error)
        section = lookup(self._config, path)
        section = section if isinstance(section, dict) else {}
        for features in filter(None, (pattern.search(text) for pattern in _FEATURES)):
            keys = [k for k, size in section.items() if str(size) == features["expected"]]
            if len(keys) == 1:
                return (
                    f"'{path}.{keys[0]}' is {features['expected']}, but the input in the first "
                    f"forward pass has {features['given']} features: write {features['given']}"
                )
        named = [key for key in section if re.search(rf"\b{key}\b", text)]
        path = f"{path}.{named[0]}" if len(named) == 1 else path
        reason = construction_errors.shortened(error)
        if path == "model":  # anywhere in it
            reason = in_a_line("".join(traceback.format_exception(error)))
        return f"'{path}' fails in the first forward pass: {reason}"

    def _path(self, error: Exception) -> str:
        """Returns the path of the section whose module was called last."""
        names = {module: name for name, module in self._model.named_modules()}
        path = "model"
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if not isinstance(module, torch.nn.Module) or module not in names:
                continue
            here = "model"
            for part in names[module].split("."):
                key = part.removeprefix("_").replace("token_embedder_", "token_embedders.")
                if lookup(self._config, f"{here}.{key}") is None:
                    break
                here = f"{here}.{key}"
            path = here if len(here) > len(path) else path
        return path
