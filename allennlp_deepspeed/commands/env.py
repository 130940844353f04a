import argparse
import ctypes.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import psutil
import torch
from torch.utils import cpp_extension

import allennlp_deepspeed_import_hook
from allennlp_deepspeed.processes.fingerprints import own_version

# In the order in which one looks for what is wrong.
_PACKAGES = (
    "allennlp",
    "deepspeed",
    "torch",
    "torchvision",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "numpy",
    "pydantic",
    "spacy",
    "fairscale",
    "peft",
    "gguf",
    "bokeh",
    "rich",
    "ninja",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "triton",
)

# What changes how a training runs: beginnings of names, and names.
_PREFIXES = (
    "ACCELERATE_",
    "ALLENNLP_",
    "CUDA_",
    "DEEPSPEED_",
    "DS_",
    "GLOO_",
    "HF_",
    "KMP_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
)
_NAMES = {
    "CC",
    "CXX",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MAX_JOBS",
    "NVIDIA_VISIBLE_DEVICES",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PYTHONPATH",
    "RANK",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
}
_SECRET = re.compile("TOKEN(?!IZERS)|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")

# Seconds that a driver or a compiler has to say its version.
_TIME_LIMIT = 10

_NOT_THERE = "not there"


class Env:
    """`allennlp deepspeed env`: what to paste into a bug report."""

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Print what to paste into a bug report: versions, the machine, compilers, compiled "
            "operators and the environment variables that matter, without secrets."
        )
        subparser = parser.add_parser("env", description=description, help=description)
        subparser.add_argument("--json", action="store_true", help="print it as JSON")
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        found = environment()
        print(json.dumps(found, indent=2) if args.json else _text(found))


def environment() -> Dict[str, Any]:
    """
    # Returns

    `Dict[str, Any]`
        What there is of this Python, its packages and this machine, by headings. What can't be
        found out has the reason in its place.
    """
    headings: Dict[str, Callable[[], Any]] = {
        "packages": _packages,
        "python": _python,
        "machine": _machine,
        "gpus": _gpus,
        "cuda": _cuda,
        "compilers": _compilers,
        "operators": _operators,
        "plugin_files": _plugin_files,
        "variables": _variables,
    }
    return {heading: _or_reason(find) for heading, find in headings.items()}


def _or_reason(find: Callable[[], Any]) -> Any:
    # A report of what is broken must not break on it, whatever it is.
    try:
        return find()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _packages() -> Dict[str, str]:
    versions = {"allennlp-deepspeed": own_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = _NOT_THERE
    return versions


def _python() -> Dict[str, Any]:
    is_on = os.environ.get(allennlp_deepspeed_import_hook.ENVIRONMENT_VARIABLE) != "0"
    return {
        "version": platform.python_version(),
        "executable": _without_home(sys.executable),
        "package": _without_home(str(Path(__file__).parents[1])),
        "import hook": "on" if is_on else "off",
    }


def _machine() -> Dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": _cores(),
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available",
        "shared memory": _free("/dev/shm"),
        "disk": _free(os.curdir),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{os.cpu_count()}, {usable} usable"


def _free(folder: str) -> str:
    if not os.path.isdir(folder):
        return _NOT_THERE
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"


def _gpus() -> List[str]:
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        capability = f"{gpu.major}.{gpu.minor}"
        found.append(f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, capability {capability}")
    return found


def _cuda() -> Dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = {"of PyTorch": torch.version.cuda or _NOT_THERE, "driver": _first_line(query)}
    found["CUDA_HOME"] = _without_home(cpp_extension.CUDA_HOME or _NOT_THERE)
    found["NCCL"] = _or_reason(_nccl)
    return found


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return _NOT_THERE
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def _compilers() -> Dict[str, str]:
    found = {
        "C++": _first_line([os.environ.get("CXX") or "c++", "--version"]),
        "CUDA": _first_line(["nvcc", "--version"], having="release"),
        "ninja": _first_line(["ninja", "--version"]),
        "libaio": _NOT_THERE,
    }
    if ctypes.util.find_library("aio") is not None:
        header = Path("/usr/include/libaio.h")
        found["libaio"] = "with headers" if header.is_file() else "without headers"
    return found


def _first_line(command: List[str], having: str = "") -> str:
    """Of what a command prints, the first line with `having` in it."""
    try:
        printed = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return _NOT_THERE
    return next((line.strip() for line in printed if having in line), _NOT_THERE)


def _operators() -> Dict[str, Any]:
    """
    DeepSpeed's, which it compiles when they are first used. A training waits for the lock that an
    interrupted compilation leaves.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    compiled = {path.parent for path in Path(folder).glob("**/*.so")}
    locked = {path.parent for path in Path(folder).glob("**/lock")} - compiled
    return {
        "folder": _without_home(folder),
        "compiled": sorted(path.name for path in compiled),
        "compiling, or interrupted": sorted(path.name for path in locked),
    }


def _plugin_files() -> List[str]:
    """Those that AllenNLP reads, and whether they name this package."""
    found = []
    for path in (Path(".allennlp_plugins"), Path.home() / ".allennlp" / "plugins"):
        if path.is_file():
            names = "allennlp_deepspeed" in path.read_text().split()
            found.append(f"{_without_home(str(path))} {'names' if names else 'lacks'} this package")
    return found


def _variables() -> Dict[str, str]:
    names = [name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES)]
    return {name: _shown(name, os.environ[name]) for name in sorted(names)}


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set, not shown)"
    return _without_home(_CREDENTIALS_IN_URL.sub("(not shown)", value))


def _without_home(text: str) -> str:
    home = str(Path.home())
    return text if len(home) < 2 else re.sub(rf"{re.escape(home)}(?=/|$|:)", "~", text)


def _text(found: Dict[str, Any]) -> str:
    lines = []
    for heading, values in found.items():
        lines.append(f"{heading.replace('_', ' ')}:")
        if isinstance(values, dict):
            width = max((len(name) for name in values), default=0)
            lines += [f"  {name:<{width}}  {_joined(value)}" for name, value in values.items()]
        elif isinstance(values, list):
            lines += [f"  {value}" for value in values]
        else:
            lines.append(f"  {values}")
        if len(values) == 0:
            lines.append("  none")
    return "\n".join(lines)


def _joined(value: Any) -> Optional[str]:
    return (", ".join(value) or "none") if isinstance(value, list) else value
