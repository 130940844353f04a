"""
Whether DeepSpeed's operators, and what PyTorch compiles, can be used on this machine: they are
compiled when they are first used, and fail in the middle of a training that lacks something for it.
"""

import importlib.util
import os
import shutil
from typing import Optional

from allennlp.common.checks import ConfigurationError
from deepspeed import git_version_info
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from torch.utils import cpp_extension

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.config.torch_compile_settings import DEFAULT_BACKEND
from allennlp_deepspeed.config.torch_compile_settings import KEY as TORCH_COMPILE


def check_operator(name: str, device_type: str, user: str, advice: str) -> None:
    """
    # Parameters

    name : `str`, required.
        Of the operator's builder, such as "CPUAdamBuilder".
    device_type : `str`, required.
        "cpu" or "cuda", what the model trains on.
    user : `str`, required.
        The start of the message: what in the config has the operator used.
    advice : `str`, required.
        The end of the message: what to write instead.

    # Raises

    `ConfigurationError`
        If the operator is still to be compiled, and something is missing for it.
    """
    accelerator = CPU_Accelerator() if device_type == "cpu" else get_accelerator()
    builder = accelerator.create_op_builder(name)
    if _is_installed(builder, accelerator.device_name()):
        return
    missing = _missing_for(builder)
    if missing is not None:
        raise ConfigurationError(
            f"{user}, for which DeepSpeed compiles its operator '{builder.name}' when it is first "
            f"used, but {missing}, or {advice}"
        )


def check_nvme(config: ResolvedConfig, device_type: str) -> None:
    """Calls `check_operator` for what `config` puts on NVMe, if it does."""
    findings = Findings()
    zero_config = config.engine_config.get("zero_optimization", {})
    for section in ("offload_param", "offload_optimizer"):
        if (zero_config.get(section) or {}).get("device") == "nvme":
            path = f"{ROOT}.zero_optimization.{section}.device"
            with findings.collect():
                check_operator("AsyncIOBuilder", device_type, f'{path} is "nvme"', 'write "cpu"')
    findings.raise_any()


def check_torch_compile(config: ResolvedConfig, device_type: str) -> None:
    """
    # Parameters

    config : `ResolvedConfig`, required.
    device_type : `str`, required.
        "cpu" or "cuda", what the model trains on.

    # Raises

    `ConfigurationError`
        If something is missing for the backend that generates code.
    """
    if (config.torch_compile or {}).get("backend") != DEFAULT_BACKEND:
        return
    missing = _missing_compiler()
    if missing is None and device_type == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "triton isn't installed: install PyTorch's build for CUDA"
    if missing is not None:
        raise ConfigurationError(
            f"'{TORCH_COMPILE}' is given, whose backend \"{DEFAULT_BACKEND}\" compiles what it "
            f'generates, but {missing}, or write {{"backend": "aot_eager"}}, which doesn\'t'
        )


def _is_installed(builder: OpBuilder, device_name: str) -> bool:
    """Whether it has come with DeepSpeed, which can be installed with operators compiled."""
    is_compiled = git_version_info.installed_ops.get(builder.name, False)
    return is_compiled and git_version_info.accelerator_name == device_name


def _missing_for(builder: OpBuilder) -> Optional[str]:
    # DeepSpeed asks for ninja also where there is nothing left to compile.
    if not cpp_extension.is_ninja_available():
        return "ninja isn't there: install Debian's package ninja-build"
    is_for_nvme = builder.name == "async_io"
    # For NVMe it compiles a program each time, to see whether libaio is there.
    if not is_for_nvme and is_built(builder):
        return None
    compiler = _missing_compiler()
    if compiler is not None:
        return compiler
    if isinstance(builder, CUDAOpBuilder) and cpp_extension.CUDA_HOME is None:
        return "CUDA's compiler nvcc isn't there: install the CUDA toolkit of PyTorch's version"
    if is_for_nvme and not builder.is_compatible(verbose=False):
        return "libaio's headers aren't there: install Debian's package libaio-dev"
    return None


def _missing_compiler() -> Optional[str]:
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the C++ compiler '{compiler}' isn't there: install Debian's package g++"
    return None


def is_built(builder: OpBuilder) -> bool:
    """Whether there is nothing left to compile of an operator."""
    directory = cpp_extension._get_build_directory(builder.name, verbose=False)
    return os.path.exists(os.path.join(directory, f"{builder.name}.so"))
