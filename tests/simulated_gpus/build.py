"""
Compiles the simulated GPUs, and sets the environment of what runs on them.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import List, Optional, Set

SOURCE = Path(__file__).with_name("runtime.cpp")

# Of PyTorch, and what of them is CUDA's.
_LIBRARIES = (
    *("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem"),
    "caffe2_nvrtc",
)
_SYMBOL = re.compile(r"(cu(da|blas|blasLt|sparse|sparseLt|solver|rand|fft)?|cudnn|nccl)[A-Z]\w*$")

_HEADERS = (
    ("nvidia/*/include", "cuda_runtime_api.h"),
    ("nvidia/*/include", "nccl.h"),
    ("triton/backends/nvidia/include", "crt/host_defines.h"),
)

_STUB = """long {0}() {{
  static bool is_known;
  simulated_gpus_unimplemented("{0}", &is_known);
  return 0;
}}"""


def missing() -> Optional[str]:
    """Returns what is needed and isn't here."""
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            return program
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "PyTorch for CUDA"
    if len(_folders_of_headers()) < len(_HEADERS):
        return "the headers of CUDA and NCCL, which come with PyTorch for CUDA and Triton"
    return None


def build(directory: Path) -> None:
    """
    Writes `libsimulated_gpus.so`, which is to be preloaded, and next to it the libraries of the
    driver and, in the folder `nvml`, of NVML, which are looked for by name.
    """
    (directory / "nvml").mkdir(parents=True)
    library, stubs = directory / "libsimulated_gpus.so", directory / "stubs.cpp"
    includes = [argument for path in _folders_of_headers() for argument in ("-idirafter", path)]
    compiled = directory / "runtime.o"
    _run("g++", "-c", "-O1", "-fPIC", "-Wall", *includes, SOURCE, "-o", compiled)
    unimplemented = sorted(_symbols(_undefined()) - _symbols(_defined(compiled)))
    lines = ['extern "C" {', "void simulated_gpus_unimplemented(const char*, bool*);"]
    stubs.write_text("\n".join([*lines, *map(_STUB.format, unimplemented), "}"]))
    _run("g++", "-shared", "-fPIC", compiled, stubs, "-o", library)
    for name in ("libcuda.so.1", "nvml/libnvidia-ml.so.1"):
        # They are empty: what is looked for in one is found in the library that it needs.
        needed = ["-Wl,--no-as-needed", library, f"-Wl,-soname,{Path(name).name}"]
        empty = ["-x", "c", "/dev/null", "-x", "none"]
        _run("g++", "-shared", *empty, *needed, "-o", directory / name)


def _run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _undefined() -> str:
    paths = [_torch() / "lib" / f"lib{name}.so" for name in _LIBRARIES]
    return _run("nm", "-D", "--undefined-only", *(path for path in paths if path.exists()))


def _defined(compiled: Path) -> str:
    return _run("nm", "--defined-only", compiled)


def _symbols(table: str) -> Set[str]:
    names = (line.split()[-1].partition("@")[0] for line in table.splitlines() if line.strip())
    return {name for name in names if _SYMBOL.match(name)}


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _folders_of_headers() -> List[Path]:
    folders = []
    for folder, name in _HEADERS:
        for path in list(_torch().parent.glob(f"{folder}/{name}"))[:1]:
            folders.append(Path(str(path).removesuffix(name)))
    return folders
