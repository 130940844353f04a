"""
Makes transformers, archives, trainings and tokenizers with AllenNLP 2.10.1 as it was released. It
runs in that environment, without this package, which `PYTHONPATH` has the tests of.

A job is a dictionary with the key "do", which names a function here, and its arguments. What it
writes is in its "directory". An error is written to `error.txt` there, and the next job is done.
"""

import copy
import json
import logging
import os
import re
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any, Dict, Optional

import torch
import transformers
from allennlp.commands.train import TrainModel
from allennlp.common import Params
from allennlp.common.meta import META_NAME, Meta
from allennlp.common.util import import_module_and_submodules, prepare_environment
from allennlp.models import archive_model

from evidence.model_library import experiments
from evidence.original import components, tokenizer_kinds
from evidence.original.outputs import outputs as outputs_of
from evidence.original.outputs import write
from tests.support import saved_tokenizers

# The names of keys of a transformer's config, and small values for them: the first that matches.
VOCABULARY_SIZE = 64
_SMALL = (
    (r"type_vocab_size", None),
    (r"(vocab|vocabulary)_size(_.*)?|.*_vocab_size", VOCABULARY_SIZE),
    (r"pad_token_id", 0),
    (r"(bos|cls|decoder_start)_token_id", 2),
    (r"(eos|sep)_token_id", 3),
    (r".*drop.*", 0.0),
    (r"num_(hidden_)?layers|n_layers?|(num_)?(decoder|encoder)_layers|num_blocks", 2),
    (r"(.*_)?(num_(attention_)?heads|n_heads?|attention_heads)", 4),
    (r"(.*_)?(head_dim|d_head|d_kv|dim_head)", 8),
    (r".*(hidden_size|embedding_size|embed_dim|emb_dim)|d_model|n_embd|dim|hidden_dim", 32),
    (r".*(intermediate_size|ffn_dim|ff_dim)|d_ff|n_inner|d_inner", 32),
    (r".*(max_position|n_positions).*", 40),
    (r".*attention_window", 8),
)


def transformer(
    directory: str,
    model_type: str,
    settings: Optional[Dict[str, Any]] = None,
    seed: int = 1,
    vocabulary: Optional[str] = None,
) -> None:
    """Writes a small transformer with random weights, and a tokenizer of pieces of words."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    values = {}
    for name, value in vars(config_class()).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        small = next((small for pattern, small in _SMALL if re.fullmatch(pattern, name)), None)
        if is_number and small is not None and not name.startswith("_"):
            values[name] = small
    config = config_class(**{**values, **(settings or {})})
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    words = [f"word{i}" for i in range(VOCABULARY_SIZE - 7)]
    path = Path(directory, "vocab.txt")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", *words]
    path.write_text(vocabulary or "\n".join(tokens))
    transformers.BertTokenizerFast(str(path)).save_pretrained(directory)
    # An auto class would take that of the model's type.
    path = Path(directory, "tokenizer_config.json")
    settings = {**json.loads(path.read_text()), "tokenizer_class": "BertTokenizerFast"}
    path.write_text(json.dumps(settings))


def tokenizer(directory: str, kind: str) -> None:
    """Saves a tokenizer, and writes what it makes of texts."""
    tokenizer_kinds.save_kind(kind, Path(directory))
    write(Path(directory, "outputs.json"), saved_tokenizers.outputs(Path(directory)))


def component(directory: str, kind: str, name: str) -> None:
    """Writes what an object of a registered name computes."""
    write(Path(directory, "outputs.json"), components.output(kind, name))


def archive(directory: str, config: Dict[str, Any], seed: int = 1) -> None:
    """Writes the archive of an untrained model."""
    params = _prepare(directory, {**config, "random_seed": seed})
    loop = TrainModel.from_params(params, serialization_dir=directory, local_rank=0)
    torch.save(loop.model.state_dict(), os.path.join(directory, "best.th"))
    archive_model(directory)
    _remove(directory, "best.th", "vocabulary", "config.json", META_NAME)


def train(directory: str, config: Dict[str, Any], keeps_checkpoints: bool = False) -> None:
    """Trains with AllenNLP's own trainer. The archive, metrics and last weights are left."""
    params = _prepare(directory, config)
    loop = TrainModel.from_params(params, serialization_dir=directory, local_rank=0)
    experiments.prepare_each_forward(loop.model, [0])
    loop.run()
    archive_model(directory)
    if not keeps_checkpoints:
        states = sorted(Path(directory).glob("model_state_e*.th"), key=os.path.getmtime)
        states[-1].rename(os.path.join(directory, "last.th"))
        for path in Path(directory).glob("*_state_e*.th"):
            path.unlink()


def _prepare(directory: str, config: Dict[str, Any]) -> Params:
    shutil.rmtree(directory, ignore_errors=True)
    Path(directory).mkdir(parents=True)
    params = Params(copy.deepcopy(config))
    params.to_file(os.path.join(directory, "config.json"))
    Meta.new().to_file(os.path.join(directory, META_NAME))
    prepare_environment(params)
    return params


def outputs(directory: str, archive_file: str, overrides: Optional[Dict[str, str]] = None) -> None:
    """Writes what an archive's model predicts and is evaluated with, to `outputs.json`."""
    write(Path(directory, "outputs.json"), outputs_of(archive_file, overrides))


def _remove(directory: str, *names: str) -> None:
    for name in names:
        path = Path(directory, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    written = json.loads(Path(sys.argv[1]).read_text())
    for package in written["packages"]:
        import_module_and_submodules(package)
    experiments.install()
    for job in written["jobs"]:
        do = globals()[job.pop("do")]
        try:
            do(**job)
        except Exception:
            Path(job["directory"]).mkdir(parents=True, exist_ok=True)
            Path(job["directory"], "error.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
