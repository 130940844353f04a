"""The training configs of a checkout of allennlp-models."""

import argparse
import contextlib
import gzip
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.commands import check as check_command
from allennlp_deepspeed.launch import train_command
from evidence.model_library.experiments import MAX_EPOCHS, write_pairs
from evidence.model_library.stand_ins import write_elmo

STAGES = (0, 2, 3)

# What a reader reads of the fixtures.
_DATA = {
    "boolq": "classification/boolq.jsonl",
    "cnn_dm": "generation/bart/data/url_lists/all_train.txt",
    "commonsenseqa": "mc/commonsenseqa.jsonl",
    "conll2003": "tagging/conll2003.txt",
    "coref": "coref/coref.gold_conll",
    "drop": "rc/drop.json",
    "ontonotes_ner": "structured_prediction/srl/conll_2012",
    "piqa": "mc/piqa.jsonl",
    "piqa_tt": "mc/piqa.jsonl",
    "ptb_trees": "structured_prediction/example_ptb.trees",
    "quac": "rc/dialog_qa/quac_sample.json",
    "quora_paraphrase": "pair_classification/quora_paraphrase.tsv",
    "semantic_dependencies": "structured_prediction/semantic_dependencies/dm.sdp",
    "sharded": "lm/bidirectional_language_model/training_data/*",
    "snli": "pair_classification/snli.jsonl",
    "squad": "rc/squad.json",
    "srl": "structured_prediction/srl/conll_2012",
    "sst_tokens": "classification/sst.txt",
    "swag": "mc/swag.csv",
    "transformer_squad": "rc/squad.json",
    "transformer_superglue_rte": "rc/superglue_rte.jsonl",
    "universal_dependencies": "structured_prediction/dependencies.conllu",
}
_IMAGES = "vision"
_VOCABULARY = "lm/bidirectional_language_model/vocab"
_NUM_SAMPLES = 10


def find(folder: Path) -> List[str]:
    """Paths in the folder, of all without images."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.jsonnet")]
    return sorted(name for name in names if not name.startswith(f"{_IMAGES}/"))


def check_all(folder: Path) -> Dict[str, Dict[str, str]]:
    """Returns, by a config's path and the stage, the message that refuses it, or `""`."""
    return {
        str(path.relative_to(folder)): check(path, path.relative_to(folder).parts[0] != _IMAGES)
        for path in sorted(folder.rglob("*.json*"))
    }


def check(path: Path, constructs: bool = True, stages: Sequence[int] = STAGES) -> Dict[str, str]:
    """
    Returns, by the stage, the message that refuses a config with two workers, or `""`: that of the
    command, or without `constructs` that of the keys alone.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        config = of_file(path)
        if constructs:
            use_amp = config["trainer"].get("use_amp", False)
            distributed = config.get("distributed")
            config = read(path, folder)
            config["trainer"]["use_amp"] = use_amp
            config["distributed"] = distributed
        own = config.get("distributed") or {}
        messages = {}
        for stage in stages:
            trainer = {**config["trainer"], "type": "deepspeed"}
            trainer["deepspeed_config"] = {"zero_optimization": {"stage": stage}}
            distributed = {**own, "cuda_devices": [-1, -1]}
            file = folder / "config.json"
            file.write_text(json.dumps({**config, "trainer": trainer, "distributed": distributed}))
            messages[str(stage)] = _message(file, constructs)
    return messages


def of_file(path: Path) -> Dict[str, Any]:
    for variable in re.findall(r"std.extVar\(['\"](.*?)['\"]\)", path.read_text()):
        os.environ.setdefault(variable, f"/nowhere/{variable}")
    return Params.from_file(str(path)).as_dict(quiet=True)


def _message(file: Path, constructs: bool) -> str:
    try:
        if not constructs:
            train_command.check(Params.from_file(str(file)))
            return ""
        args = argparse.Namespace(
            param_path=str(file),
            overrides="",
            tries=False,
            overfit=False,
            compare=False,
            include_package=[],
        )
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            check_command.run(args)
    except ConfigurationError as error:
        return " ".join(str(error.message).split())
    return ""


def read(path: Path, folder: Path) -> Dict[str, Any]:
    """
    A config that trains two epochs on the data of the fixtures and downloads nothing. `folder` gets
    the files for that. It differs in these alone, but for `use_amp`, which needs a GPU, and
    `num_samples`, of which the fixtures have too few words.
    """
    fixtures = Path("test_fixtures")
    config = _with_stand_ins(of_file(path), fixtures, folder)
    data = str((fixtures / _DATA[config["dataset_reader"]["type"]]).resolve())
    for key in ("train_data_path", "validation_data_path"):
        if key in config:
            config[key] = data
    config.pop("test_data_path", None)
    config.pop("evaluate_on_test", None)
    if str(config.get("vocabulary", {}).get("directory")).startswith("/nowhere"):
        config["vocabulary"]["directory"] = str(fixtures / _VOCABULARY)
    if "num_samples" in config["model"]:
        config["model"]["num_samples"] = _NUM_SAMPLES
    config["trainer"].pop("use_amp", None)
    config["trainer"]["num_epochs"] = min(config["trainer"].get("num_epochs", 20), MAX_EPOCHS)
    return config


def _with_stand_ins(value: Any, fixtures: Path, folder: Path) -> Any:
    if isinstance(value, list):
        return [_with_stand_ins(item, fixtures, folder) for item in value]
    if isinstance(value, dict):
        if "_pretrained" in value:
            # That of the archive.
            model = Params.from_file("training_config/pair_classification/snli_roberta.jsonnet")
            return model["model"].as_dict(quiet=True)
        changed = {key: _with_stand_ins(item, fixtures, folder) for key, item in value.items()}
        if value.get("type") == "elmo_token_embedder" or "options_file" in value:
            options, weights = write_elmo(fixtures, folder)
            changed.update(options_file=str(options), weight_file=str(weights))
        return changed
    if isinstance(value, str) and value.startswith("http"):
        vectors = re.search(r"glove\.\w+\.(\d+)d", value)
        if vectors:
            return str(_write_vectors(fixtures, folder, int(vectors[1])))
        if value.endswith("_pairs.json"):
            return str(write_pairs(folder))
    return value


def _write_vectors(fixtures: Path, folder: Path, size: int) -> Path:
    """Writes the fixtures' vectors of 300 dimensions with fewer."""
    path = folder / f"glove.{size}d.txt.gz"
    with gzip.open(fixtures / "glove.6B.300d.sample.txt.gz", "rt", encoding="utf-8") as lines:
        text = "".join(" ".join(line.split(" ")[: size + 1]).strip() + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode("utf-8")))
    return path
