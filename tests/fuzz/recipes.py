"""
The configs that are changed, made small: every recipe of `training_configs/`, the fixtures, and the
classifier of the fixtures with each of the pasted DeepSpeed configurations.
"""

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any, Dict

from allennlp.common import Params

from tests.fixtures.tiny_lm import LLAMA, tiny_tokenizer
from tests.fuzz.pasted import PASTED
from tests.support.command import REPOSITORY
from tests.support.experiment import TWO_WORKERS, load_config

Config = Dict[str, Any]

RECIPES = [path.stem for path in sorted((REPOSITORY / "training_configs").glob("*.jsonnet"))]
FIXTURES = ["bi_encoder", "causal_lm", "classifier", "tagger", "transformer"]
NAMES = [*RECIPES, *FIXTURES, *PASTED]

# Of each data file, on each worker.
_INSTANCES = 24

_DATA = REPOSITORY / "tests" / "fixtures" / "data"
_FILES = {
    "text_classification_json": "classification_{}.jsonl",
    "causal_lm": "classification_{}.jsonl",
    "text_pairs": "pairs_{}.jsonl",
    "sequence_tagging": "tagging_{}.tsv",
}


def recipe(name: str, directory: Path) -> Config:
    """
    # Parameters

    name : `str`, required.
        One of `NAMES`.
    directory : `Path`, required.
        Where a tokenizer can be.

    # Returns

    `Dict[str, Any]`
        A config that trains within seconds on two workers without a GPU.
    """
    tokenizer = tiny_tokenizer(directory / "tokenizer")
    if name in PASTED:
        config = load_config("classifier", TWO_WORKERS, {"trainer.type": "deepspeed"})
        config["trainer"]["deepspeed_config"] = deepcopy(PASTED[name])
        if "optimizer" in PASTED[name]:
            del config["trainer"]["optimizer"]
            optimizer = config["trainer"]["deepspeed_config"]["optimizer"]
            if "Adam" in optimizer["type"]:
                # DeepSpeed's own has to be compiled.
                optimizer["params"]["torch_adam"] = True
    elif name in FIXTURES:
        config = load_config(name, TWO_WORKERS, {"trainer.type": "deepspeed"})
    else:
        config = deepcopy(_file(name))
        if name == "verse_retrieval_minilm":
            # Without its weights.
            for key in ("dataset_reader", "vocabulary", "model"):
                config[key] = deepcopy(_file("verse_retrieval")[key])
        config["distributed"] = {"cuda_devices": [-1, -1]}
    return _small(config, tokenizer)


@functools.cache
def _file(name: str) -> Config:
    path = REPOSITORY / "training_configs" / f"{name}.jsonnet"
    return Params.from_file(path, ext_vars={"MODEL": "m", "MINILM": "m"}).as_dict(quiet=True)


def _small(config: Config, tokenizer: str) -> Config:
    for part in ("train", "validation", "test"):
        key = f"{part}_data_path"
        if key not in config:
            continue
        file = _FILES[config["dataset_reader"]["type"]]
        config[key] = str(_DATA / file.format("train" if part == "train" else "validation"))
    for key in ("dataset_reader", "validation_dataset_reader"):
        if key in config:
            config[key] = {**config[key], "max_instances": _INSTANCES}
            if config[key]["type"] == "causal_lm":
                config[key].update(tokenizer=tokenizer, max_length=32, loss_on="all")
            config[key].pop("text_key", None)
    if config["model"]["type"] == "causal_lm":
        lora = {key: value for key, value in config["model"].items() if key == "lora"}
        config["model"] = {"type": "causal_lm", "config": deepcopy(LLAMA), **lora}
    for key in ("data_loader", "validation_data_loader"):
        loader = deepcopy(config.get(key, {}))
        for section in (loader, loader.get("batch_sampler", {})):
            if "batch_size" in section:
                section["batch_size"] = min(section["batch_size"], 6)
        loader.pop("batches_per_epoch", None)
        if loader:
            config[key] = loader
    config["trainer"]["num_epochs"] = 1
    return config
