"""
Has a process that many are forked from go through what a training does, so that Python, PyTorch and
pydantic have made what they keep from the first time on: signatures, patterns, validators,
subclasses of abstract classes, kernels. A tenth of a training's CPU time.

No backward pass: PyTorch then refuses one in a forked process. No process group: its threads don't
come along.
"""

import contextlib
import copy
import io
import random
import sys
import warnings
from typing import Any, Iterator
from unittest import mock

import numpy
import torch
from allennlp.commands import parse_args
from allennlp.common import Params, Tqdm
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import Model
from allennlp.training.optimizers import Optimizer
from deepspeed.utils import logging as deepspeed_logging
from transformers.utils import logging as transformers_logging

from allennlp_deepspeed.launch.config_check import check
from tests.support.experiment import TWO_WORKERS, Config, deepspeed, load_config

_CONFIGS = ("tagger", "classifier", "transformer", "bi_encoder")


def go_through_all_but_training() -> None:
    """Random states stay as they are, and what is shown once is still to be shown."""
    states = random.getstate(), numpy.random.get_state()
    # A bar starts a thread, which would not come along.
    without_bars = mock.patch.object(Tqdm, "tqdm", lambda iterable, *args, **kwargs: iterable)
    with torch.random.fork_rng(devices=[]), without_bars, _warning_again():
        _parse_arguments()
        for name in _CONFIGS:
            for stage in (2, 3):
                check(Params(deepspeed(load_config(name, TWO_WORKERS), stage)))
            _construct_and_step(load_config(name))
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@contextlib.contextmanager
def _warning_again() -> Iterator[None]:
    """What is warned of within is not, and is warned of as if for the first time after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_warn_always(True)
        yield
        torch.set_warn_always(False)
    deepspeed_logging.warning_once.cache_clear()
    transformers_logging.warning_once.cache_clear()


def _parse_arguments() -> None:
    with mock.patch.object(sys, "argv", ["allennlp", "train", "config.json", "-s", "out"]):
        parse_args(prog="allennlp")


def _construct_and_step(config: Config) -> None:
    params = Params(copy.deepcopy(config))
    reader: Any = DatasetReader.from_params(params.pop("dataset_reader"))
    path = params.pop("train_data_path")
    loader = DataLoader.from_params(params.pop("data_loader"), reader=reader, data_path=path)
    vocab = Vocabulary.from_instances(loader.iter_instances())
    loader.index_with(vocab)
    model = Model.from_params(params.pop("model"), vocab=vocab)
    with torch.no_grad():
        model(**next(iter(loader)))
    model.get_metrics(reset=True)
    named = list(model.named_parameters())
    optimizer: Any = Optimizer.from_params(
        params.pop("trainer").pop("optimizer"), model_parameters=named
    )
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    torch.load(file, weights_only=True)
