"""The files of a checkpoint that DeepSpeed's engine saves."""

from pathlib import Path

import pytest
import torch

from allennlp_deepspeed.checkpoint.checkpoint_engine import FileCheckpointEngine


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_is_loaded(tmp_path: Path, asynchronous: bool) -> None:
    path = str(tmp_path / "state.pt")
    weight = torch.randn(100)
    engine = FileCheckpointEngine(asynchronous)
    engine.save({"weight": weight}, path)
    engine.write_staged()
    assert torch.equal(engine.load(path)["weight"], weight)
