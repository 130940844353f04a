"""The swap files of NVMe. That training with them removes them is tested where libaio is there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import torch

from allennlp_deepspeed.engine import engine_workarounds


def engine(path: Path, rank: int) -> Any:
    """As far as it has swap files: of parameters that share a swapper, and of the optimizer."""
    folders = [path / "zero_stage_3" / kind / f"rank{rank}" for kind in ("params", "optimizer")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "0.tensor.swp").touch()
    swappers = [SimpleNamespace(swap_folder=str(folder)) for folder in folders]
    module = torch.nn.Linear(1, 1)
    for parameter in module.parameters():
        parameter.nvme_swapper = swappers[0]  # type: ignore[attr-defined]
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(optimizer_swapper=swappers[1]))


def test_each_rank_removes_its_own_swap_files(tmp_path: Path):
    (tmp_path / "notes").touch()
    engines = [engine(tmp_path, rank) for rank in range(2)]

    def left() -> List[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    engine_workarounds.remove_swap_files(engine_workarounds.swap_folders(engines[0]))
    assert [path for path in left() if path.endswith(".swp")] == [
        "zero_stage_3/optimizer/rank1/0.tensor.swp",
        "zero_stage_3/params/rank1/0.tensor.swp",
    ]
    engine_workarounds.remove_swap_files(engine_workarounds.swap_folders(engines[1]))
    assert left() == ["notes"]


def test_a_training_without_nvme_has_none():
    plain = SimpleNamespace(module=torch.nn.Linear(1, 1), optimizer=None)
    assert engine_workarounds.swap_folders(plain) == set()  # type: ignore[arg-type]
