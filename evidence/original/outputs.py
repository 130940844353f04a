"""What an archive's model puts out, as JSON. Both environments run it."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any, Dict, Optional

from allennlp.common import Params
from allennlp.data import DataLoader
from allennlp.models import load_archive
from allennlp.training.util import evaluate

NUM_INSTANCES = 4


def outputs(archive_file: str, overrides: Optional[Dict[str, str]] = None) -> Dict[str, Any]:
    """
    Predictions and metrics, of the data of the archive's validation.

    # Parameters

    archive_file : `str`
    overrides : `Optional[Dict[str, str]]`, optional (default = `None`)
        Of the archive's config.
    """
    archive = load_archive(archive_file, overrides=overrides or {})
    model = archive.model
    model.eval()  # That of some models returns nothing.
    config = archive.config.as_dict(quiet=True)
    section = copy.deepcopy(config.get("validation_data_loader") or config.get("data_loader"))
    # Those of AllenNLP 0.9 had an iterator.
    params = Params(section if isinstance(section, dict) else {"batch_size": 4})
    for key in ("shuffle", "batches_per_epoch"):
        params.pop(key, None)
    loader = DataLoader.from_params(
        params,
        reader=archive.validation_dataset_reader,
        data_path=config.get("validation_data_path") or config["train_data_path"],
    )
    loader.index_with(model.vocab)
    instances = list(itertools.islice(loader.iter_instances(), NUM_INSTANCES))
    predictions = model.forward_on_instances(instances)
    metrics = evaluate(model, loader, cuda_device=-1)
    return as_json({"predictions": predictions, "metrics": metrics})


def as_json(value: Any) -> Any:
    """With lists for tensors, and without what is neither data nor a number."""
    return json.loads(json.dumps(value, default=_plain, skipkeys=True))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else None


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(value)))
