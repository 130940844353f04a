"""
Reads the config of a finished or stopped training.
"""

import os

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models.archival import CONFIG_NAME


def read_config(serialization_dir: str) -> Params:
    """
    Reads the config that AllenNLP has written into a serialization directory.

    # Raises

    `ConfigurationError`
        If it is missing, can't be parsed, or isn't the config of a training.
    """
    path = os.path.join(serialization_dir, CONFIG_NAME)
    if not os.path.isfile(path):
        raise ConfigurationError(
            f"{path} is missing: pass the serialization directory of a training, or restore it."
        )
    try:
        params = Params.from_file(path)
    except Exception as error:  # of the parser, the file system or AllenNLP
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigurationError(f"{path} could not be read: {reason}") from error
    config = params.params
    if not isinstance(config, dict) or not isinstance(config.get("model", {}), (dict, str)):
        raise ConfigurationError(f"{path} has no object 'model', as configs of AllenNLP have.")
    patterns = config.get("include_in_archive") or []
    is_inside = isinstance(patterns, list) and all(map(_is_inside, patterns))
    if not is_inside:
        raise ConfigurationError(
            f"'include_in_archive' in {path} must be a list of paths in the directory."
        )
    return params


def _is_inside(path: object) -> bool:
    return isinstance(path, str) and not os.path.isabs(path) and ".." not in path.split("/")
