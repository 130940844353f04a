import argparse
import io
import os
import re
import traceback
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Callable, Dict

from deepspeed import env_report
from torch.utils import collect_env

import allennlp_deepspeed_import_hook
from allennlp_deepspeed.versions import own_version

# Packages that neither PyTorch's report nor DeepSpeed's lists.
_PACKAGES = (
    "allennlp",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "pydantic",
    "spacy",
    "fairscale",
    "peft",
    "gguf",
    "bokeh",
    "rich",
)

# Environment variables that change how a training runs.
_VARIABLES = re.compile(
    "(ACCELERATE|ALLENNLP|CUDA|DEEPSPEED|DS|GLOO|HF|KMP|MALLOC|MASTER|MKL|NCCL|NVIDIA|OMP|OMPI"
    "|PMI|PYTORCH|SLURM|TOKENIZERS|TRANSFORMERS)_|TORCH"
    "|(CC|CXX|LD_LIBRARY_PATH|LD_PRELOAD|(LOCAL_)?RANK|MAX_JOBS|PYTHONPATH|WORLD_SIZE)$"
)
_SECRET = re.compile("TOKEN(?!IZERS)|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_COLOUR = re.compile(r"\x1b\[\d*m")


def run(args: argparse.Namespace) -> None:
    """Prints the environment for a bug report."""
    print(report())


def report() -> str:
    """
    Describes this Python, its packages and this machine. A section that fails contains its error
    instead, and paths are relative to the home directory.
    """
    sections: Dict[str, Callable[[], str]] = {
        "allennlp-deepspeed": _package,
        "Environment variables": _variables,
        "torch.utils.collect_env": collect_env.get_pretty_env_info,
        "ds_report": _ds_report,
    }
    text = "\n\n".join(
        f"== {name} ==\n{_section_or_error(section)}" for name, section in sections.items()
    )
    return re.sub(rf"{re.escape(str(Path.home()))}(?=/|$|:)", "~", text, flags=re.MULTILINE)


def _section_or_error(section: Callable[[], str]) -> str:
    try:
        return section().strip()
    except Exception:  # a report on a broken environment must not fail on it
        return traceback.format_exc()


def _package() -> str:
    is_on = os.environ.get(allennlp_deepspeed_import_hook.ENVIRONMENT_VARIABLE) != "0"
    lines = [
        f"version: {own_version()}",
        f"folder: {Path(__file__).parents[1]}",
        f"import hook: {'on' if is_on else 'off'}",
    ]
    for path in (Path(".allennlp_plugins"), Path.home() / ".allennlp" / "plugins"):
        if path.is_file():
            names = "allennlp_deepspeed" in path.read_text().split()
            lines.append(f"plugin file: {path} {'names' if names else 'lacks'} this package")
    return "\n".join([*lines, *(f"{name}: {_version(name)}" for name in _PACKAGES)])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _variables() -> str:
    return "\n".join(
        f"{name}={'(set, not shown)' if _SECRET.search(name) else _without_credentials(value)}"
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name)
    )


def _without_credentials(value: str) -> str:
    return _CREDENTIALS_IN_URL.sub("(not shown)", value)


def _ds_report() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        env_report.main()
    return _COLOUR.sub("", printed.getvalue())
