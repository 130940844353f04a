"""
Prepares a serialization directory to be recovered by another number of workers.
"""

import json
import logging
import os
from typing import Any, Dict, List, Union

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models.archival import CONFIG_NAME

from allennlp_deepspeed import files
from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.config.own_keys import may_change

logger = logging.getLogger(__name__)


def prepare(params: Params, serialization_dir: Union[str, os.PathLike]) -> None:
    """
    Makes `allennlp train --recover` continue if `params` divides the work in another way than the
    training in `serialization_dir` did: the recorded config becomes `params`, which AllenNLP
    compares with it.

    # Parameters

    params : `Params`, required.
        The whole config of a "deepspeed" trainer. It is not changed.
    serialization_dir : `Union[str, os.PathLike]`, required.

    # Raises

    `ConfigurationError`
        If anything else is different.
    """
    serialization_dir = os.fspath(serialization_dir)
    path = os.path.join(serialization_dir, CONFIG_NAME)
    if not os.path.isfile(path):
        return
    recorded = Params.from_file(path)
    differing = _differing_keys(params, recorded)
    fixed = [key for key in differing if not may_change(key)]
    if fixed:
        raise ConfigurationError(
            f"A training that is continued has the config that it began with, which is {path}. "
            f"Of this one differs: {_changes(params, recorded, fixed[:_MAX_NAMED])}"
            + (f"; and {len(fixed) - _MAX_NAMED} more" if len(fixed) > _MAX_NAMED else "")
            + ". Write it as it was, or train into another directory."
        )
    if differing:
        _replace_config(path, params, recorded, differing)


def number_of_workers(params: Params) -> int:
    """The number of workers on all nodes."""
    distributed = params.as_dict(quiet=True).get("distributed")
    if not distributed:
        return 1
    return len(distributed.get("cuda_devices") or []) * distributed.get("num_nodes", 1)


def _differing_keys(params: Params, recorded: Params) -> List[str]:
    now, then = params.as_flat_dict(), recorded.as_flat_dict()
    missing = object()
    keys = dict.fromkeys([*then, *now])
    return [key for key in keys if now.get(key, missing) != then.get(key, missing)]


def _replace_config(path: str, params: Params, recorded: Params, differing: List[str]) -> None:
    changes = _changes(params, recorded, differing)
    announce(logger, "Continues with another config, which %s has now: %s", path, changes)
    temporary_path = f"{path}.unfinished"
    files.write(json.dumps(params.as_dict(quiet=True), indent=4), temporary_path)
    files.flush(temporary_path)
    files.rename(temporary_path, path)
    files.flush(os.path.dirname(path))


def _changes(params: Params, recorded: Params, keys: List[str]) -> str:
    now, then = params.as_flat_dict(), recorded.as_flat_dict()
    return "; ".join(f"{key} was {_value(then, key)} and is {_value(now, key)}" for key in keys)


# Of what can't change. Another experiment's directory differs in everything.
_MAX_NAMED = 5
_MAX_LENGTH = 100  # characters of a value


def _value(flat: Dict[str, Any], key: str) -> str:
    if key not in flat:
        return "not set"
    # From Python a value may be no JSON.
    text = json.dumps(flat[key], default=repr)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
