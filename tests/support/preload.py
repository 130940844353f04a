"""
Imports what a training imports, in the fork server that tests start commands from and in processes
that fork workers: imports take longer than most of the trainings.
"""

import contextlib
import functools
import os
import sys
from typing import Optional, Set

# A process that has initialized CUDA can't fork others that use it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import allennlp.commands  # noqa: E402, F401
import allennlp.modules.seq2seq_encoders  # noqa: E402, F401
import cpuinfo  # noqa: E402

# What DeepSpeed imports when it constructs an engine; with Muon comes PyTorch's compiler.
import deepspeed.comm.mori  # noqa: E402, F401
import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401
import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: E402, F401
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: E402, F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import torch  # noqa: E402
import torch._subclasses.schema_check_mode  # noqa: E402, F401
import torch.utils.serialization.config  # noqa: E402, F401
from allennlp.common import util  # noqa: E402

with contextlib.suppress(ImportError):
    import peft  # noqa: F401

PACKAGES = ("allennlp", "allennlp_deepspeed", "tests.fixtures")
import_package = util.import_module_and_submodules
for package in PACKAGES:
    import_package(package, exclude={"allennlp.sanity_checks", "allennlp.tools"})


def import_new_package(package_name: str, exclude: Optional[Set[str]] = None) -> None:
    if package_name not in PACKAGES:
        import_package(package_name, exclude)


# Looking for the modules of what is imported already is half of what a training of the tests takes
# of a processor.
for module in list(sys.modules.values()):
    if vars(module).get("import_module_and_submodules") is import_package:
        vars(module)["import_module_and_submodules"] = import_new_package

torch.set_num_threads(1)
# A forked process creates PyTorch's thread pool again when it is first needed, and aborts if the
# threads of a backward pass are the first to need it, which all do at the same time.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

# DeepSpeed's operators for the CPU ask py-cpuinfo three times for what takes a second to find.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
