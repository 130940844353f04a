"""Every recipe in `training_configs/` trains, here for one epoch on a sample of the verses."""

import json
from pathlib import Path
from typing import Any, Dict

import pytest
from allennlp.common import Params
from allennlp.common.testing import requires_multi_gpu
from deepspeed.accelerator import get_accelerator

from tests.command import REPOSITORY, allennlp
from tests.verses import write_sample

RECIPES = REPOSITORY / "training_configs"


@pytest.fixture(scope="module")
def verses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a sample of the verses, in files named as the demo's."""
    directory = tmp_path_factory.mktemp("verses")
    # Which leaves an epoch a few steps.
    write_sample(directory, every=120)
    return directory


def train(name: str, verses: Path, serialization_dir: Path) -> Dict[str, Any]:
    """Returns the metrics of a short run of the recipe."""
    recipe = RECIPES / f"{name}.jsonnet"
    short_form: Dict[str, Any] = {"trainer.num_epochs": 1}
    for key, path in Params.from_file(recipe).params.items():
        if key.endswith("_data_path"):
            short_form[key] = str(verses / Path(path).name)
    allennlp(
        "train",
        recipe,
        "-s",
        serialization_dir,
        "--overrides",
        json.dumps(short_form),
        # DeepSpeed compiles an operator when it is first used.
        time_limit=300,
    ).check()
    assert (serialization_dir / "model.tar.gz").exists()
    return json.loads((serialization_dir / "metrics.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed_optimizer",
        "ds_config",
        "gradient_accumulation",
        "one_process",
        "verse_classifier",
        "zero_2_bf16",
        "zero_3",
        "zero_3_offload",
    ],
)
def test_recipe_trains(name: str, verses: Path, tmp_path: Path) -> None:
    metrics = train(name, verses, tmp_path / "out")
    assert "validation_accuracy" in metrics
    assert "test_accuracy" not in metrics


def test_recipe_with_a_test_set_evaluates_it(verses: Path, tmp_path: Path) -> None:
    assert "test_accuracy" in train("evaluate_on_test", verses, tmp_path / "out")


@pytest.mark.skipif(
    not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False),
    reason="needs libaio's headers (Debian's package libaio-dev)",
)
def test_recipe_for_nvme_trains(verses: Path, tmp_path: Path) -> None:
    train("zero_3_nvme", verses, tmp_path / "out")


@requires_multi_gpu
def test_recipe_for_two_gpus_trains(verses: Path, tmp_path: Path) -> None:
    train("two_gpus", verses, tmp_path / "out")
