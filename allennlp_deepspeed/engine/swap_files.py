"""
Removes the swap files of a training whose parameters or optimizer states are on NVMe.
"""

import os
import shutil
from contextlib import suppress
from typing import Iterable, Set

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine


def swap_folders(engine: DeepSpeedEngine) -> Set[str]:
    """The folders in which this rank alone has swap files, of parameters and of the optimizer."""
    swappers = [getattr(p, "nvme_swapper", None) for p in engine.module.parameters()]
    swappers.append(getattr(engine.optimizer, "optimizer_swapper", None))
    return {swapper.swap_folder for swapper in swappers if swapper is not None}


def remove_swap_files(folders: Iterable[str]) -> None:
    """
    To be called when the engine is gone.

    # Parameters

    folders : `Iterable[str]`, required.
        As `swap_folders` gave them.

    Works around DeepSpeed 0.19.8: its swap files stay when the engine is destroyed. Gone when
    something in `deepspeed.runtime.swap_tensor` removes files.
    """
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        # What several ranks share goes with the last: "zero_stage_3" and what it holds.
        for parent in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
            with suppress(OSError):
                os.rmdir(parent)
