"""
Has a process that many are forked from go through what a training does before its first step, so
that Python, PyTorch and pydantic have made what they keep from the first time on: signatures,
patterns, validators, subclasses of abstract classes, kernels. A tenth of a training's CPU time.

No backward pass: PyTorch then refuses one in a forked process. No process group: its threads don't
come along.
"""

import copy
import io
import random
import sys
import warnings
from typing import Any
from unittest import mock

import numpy
import torch
from allennlp.commands import parse_args
from allennlp.common import Params, Tqdm
from allennlp.common.plugins import import_plugins
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import Model
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.launch.config_check import check
from tests.support.experiment import TWO_WORKERS, Config, deepspeed, load_config

_CONFIGS = ("tagger", "classifier", "transformer", "bi_encoder")


def go_through_all_but_training() -> None:
    """Random states stay as they are."""
    states = random.getstate(), numpy.random.get_state()
    quiet = mock.patch.object(Tqdm, "tqdm", lambda iterable, *args, **kwargs: iterable)
    with torch.random.fork_rng(devices=[]), quiet, warnings.catch_warnings():
        # What is shown once would not be shown again in the processes that are forked.
        warnings.simplefilter("ignore")
        _parse_arguments()
        for name in _CONFIGS:
            for stage in (2, 3):
                check(Params(deepspeed(load_config(name, TWO_WORKERS), stage)))
            _construct_and_step(load_config(name))
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _parse_arguments() -> None:
    import_plugins()
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
