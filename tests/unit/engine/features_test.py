"""What is installed around the engine, in which order, and that it is undone in the reverse one."""

from contextlib import contextmanager
from graphlib import CycleError
from pathlib import Path
from typing import Any, Dict, Iterator, List
from unittest import mock

import pytest
import torch

from allennlp_deepspeed.engine.lifecycle import features
from tests.integration.elementwise_test import Layers, batches
from tests.support.side_by_side import Side

_ORDER = [
    "process environment",
    "parameters of any shape and layout",
    "process environment of stage 3",
    "access to parameters that an earlier engine has sharded",
    "compiled forward pass",
    "half precision",
    "penalty in fp32",
    "partitioned regularizer",
    "attributes that share memory",
    "snapshot of the model",
    "steps of an optimizer that had an engine",
    "trainable parameters first",
    "leaf modules",
    "type of parameters on NVMe",
    "initialize",
    "memory of attributes",
    "what DeepSpeed has added to the model",
    "modes of the engine and the model",
    "reports",
    "activation checkpointing",
    "misaligned gradients on NVMe",
    "outputs of any type",
    "copies without hooks",
    "hooks without a graph",
    "inner gradients",
    "inference mode",
    "gathers after writes",
    "repeated calls of leaf modules",
    "end of a forward pass that fails",
    "trace of module calls",
    "parameters of the regularizer",
    "no step at the start",
    "the given Adagrad",
    "steps by the engine only",
    "loss scale",
    "compiled leaf modules",
    "uncompilable parts",
    "unrounded master weights",
    "memory of the snapshot",
    "backward pass of a loss",
    "fixed parameter groups",
    "one step of all groups",
    "no access to released parameters",
    "parameters in groups",
    "states of master weights",
]
_PLAIN = [
    "process environment",
    "parameters of any shape and layout",
    "access to parameters that an earlier engine has sharded",
    "attributes that share memory",
    "snapshot of the model",
    "steps of an optimizer that had an engine",
    "trainable parameters first",
    "initialize",
    "memory of attributes",
    "what DeepSpeed has added to the model",
    "modes of the engine and the model",
    "reports",
    "activation checkpointing",
    "steps by the engine only",
    "memory of the snapshot",
    "fixed parameter groups",
    "one step of all groups",
    "states of master weights",
]
_OF_STAGE_3 = [
    "process environment of stage 3",
    "partitioned regularizer",
    "copies without hooks",
    "hooks without a graph",
    "inner gradients",
    "inference mode",
    "outputs of any type",
    "repeated calls of leaf modules",
    "end of a forward pass that fails",
    "parameters of the regularizer",
    "no access to released parameters",
    "parameters in groups",
]
_WITH_RANKS = ["leaf modules", "trace of module calls"]
_OF_STAGE_0 = ["backward pass of a loss"]
_WITH_SHARDS = ["trainable parameters first", "fixed parameter groups", "one step of all groups"]
_OF_STAGE_0_IN_FP32 = [
    *_WITH_SHARDS,
    *("attributes that share memory", "memory of attributes", "states of master weights"),
]
_HALF = ["half precision", "penalty in fp32", "unrounded master weights"]


class Recorder:
    """Records what each feature of a trainer does."""

    def __init__(self) -> None:
        self.installed: List[str] = []
        self.undone: List[str] = []

    def recording(self, feature: features.Feature) -> features.Feature:
        @contextmanager
        def installed(undoing: Any) -> Iterator[None]:
            with undoing:
                yield
            self.undone.append(feature.name)

        def install(owner: Any) -> Any:
            undoing = feature.install(owner)
            self.installed.append(feature.name)
            return undoing and installed(undoing)

        return feature._replace(install=install)

    def __call__(self, _: Any) -> List[str]:
        return self.installed


def installed(stage: int, world_size: int = 1, **config: Any) -> List[str]:
    recorder = Recorder()
    recorded = tuple(map(recorder.recording, features.FEATURES))
    side = Side(Layers, batches, stage, world_size, deepspeed_config=config)
    with mock.patch.object(features, "FEATURES", recorded):
        return side.on_all_ranks(recorder)[0]


@pytest.mark.parametrize(
    "stage, world_size, config, others, without",
    [
        (2, 1, {}, [], []),
        (2, 2, {}, [], []),
        (1, 1, {}, [], []),
        (0, 1, {}, _OF_STAGE_0, _OF_STAGE_0_IN_FP32),
        (3, 1, {}, _OF_STAGE_3, []),
        (3, 2, {}, [*_OF_STAGE_3, *_WITH_RANKS], []),
        (2, 1, {"bf16": {"enabled": True}}, _HALF, []),
        (2, 2, {"fp16": {"enabled": True}}, [*_HALF[:2], "loss scale"], []),
        (
            0,
            1,
            {"fp16": {"enabled": True}},
            [*_HALF, "loss scale", "no step at the start"],
            _WITH_SHARDS,
        ),
        (3, 1, {"bf16": {"enabled": True}}, [*_OF_STAGE_3, *_HALF[::2]], []),
    ],
)
def test_features_that_a_config_installs(
    stage: int, world_size: int, config: Dict[str, Any], others: List[str], without: List[str]
) -> None:
    names = installed(stage, world_size, **config)
    assert set(names) == {*_PLAIN, *others} - {*without}
    assert names == [name for name in _ORDER if name in names]


@pytest.mark.parametrize("stage", [0, 3])
def test_features_are_undone_in_reverse_order(tmp_path: Path, stage: int) -> None:
    recorder = Recorder()
    recorded = tuple(map(recorder.recording, features.FEATURES))
    side = Side(Layers, batches, stage)

    with mock.patch.object(features, "FEATURES", recorded):
        side.on_rank(0, lambda trainer: None, tmp_path)
    with_undoing = [name for name in recorder.installed if name in recorder.undone]
    assert recorder.undone == with_undoing[::-1]
    assert recorder.undone[-1] == "process environment"
    assert not torch.distributed.is_initialized()


def test_the_order_is_that_of_the_list_and_respects_what_must_be_before() -> None:
    names = [feature.name for feature in features.FEATURES]
    for feature in features.FEATURES:
        assert all(names.index(before) < names.index(feature.name) for before in feature.after)
    assert names == _ORDER


def test_shards_are_found_when_all_groups_are_linked_to_them() -> None:
    names = [feature.name for feature in features.FEATURES]
    of_shards = [f.name for f in features.FEATURES if "shards" in f.install.__code__.co_names]
    assert len(of_shards) == 4
    assert min(map(names.index, of_shards)) > names.index("the given Adagrad")


@pytest.mark.parametrize("after, error", [("no feature", ValueError), ("b", CycleError)])
def test_an_order_that_cannot_be_is_refused(after: str, error: type) -> None:
    with pytest.raises(error, match=after):
        features.in_order(
            features.Feature("a", lambda _: None, after=(after,)),
            features.Feature("b", lambda _: None, after=("a",)),
        )


def test_a_feature_comes_before_one_that_is_listed_before_it() -> None:
    def feature(name: str, *after: str) -> features.Feature:
        return features.Feature(name, lambda _: None, after=after)

    ordered = features.in_order(feature("a", "c"), feature("b"), feature("c"), feature("d", "a"))
    assert [each.name for each in ordered] == ["b", "c", "a", "d"]
