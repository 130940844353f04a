"""
Saving a checkpoint while training goes on.
"""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from tests.support.communication import CommunicationCounter, Traffic
from tests.support.side_by_side import Side, trained

DIM = 8


class TwoLayers(Model):
    """All but the weights of the first layer are small, and one of these isn't trained."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.layers[2].bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layers(inputs).square().mean()}


def batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(6, DIM, generator=generator)} for _ in range(3)]


class Save(TrainerCallback):
    """After the second step, and counts what crosses the network for it."""

    def __init__(self, serialization_dir: Path) -> None:
        super().__init__(str(serialization_dir))
        self.counter = CommunicationCounter()
        self.elements: List[int] = []  # of each parameter that this rank has after the save

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.engine.global_steps != 2 or self.counter.read():
            return
        checkpointer = DeepSpeedCheckpointer(self.serialization_dir)
        with self.counter:
            checkpointer.save_checkpoint(trainer)
        self.elements = [
            parameter.numel() if parameter.ds_status is ZeroParamStatus.AVAILABLE else 0
            for parameter in trainer.model.parameters()
        ]
        checkpointer.finish()


def train_and_save(trainer: Any) -> Tuple[Dict[str, Any], List[int], Dict[str, Traffic]]:
    (save,) = (callback for callback in trainer.callbacks if isinstance(callback, Save))
    return trained(trainer), save.elements, save.counter.read()


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="the process groups of this PyTorch have no hooks",
)
def test_a_save_gathers_only_the_persistent_parameters_of_stage_3(tmp_path: Path) -> None:
    zero = {"stage3_param_persistence_threshold": DIM}
    arguments: Any = {"world_size": 2, "zero": zero}
    without = Side(TwoLayers, batches, 3, **arguments).on_all_ranks(trained)
    saving = Side(TwoLayers, batches, 3, callbacks=lambda: [Save(tmp_path)], **arguments)
    for (weights, elements, traffic), expected in zip(
        saving.on_all_ranks(train_and_save), without, strict=True
    ):
        # What the ranks agree on, such as whether the tag is the same.
        assert "all_reduce" in traffic
        # DeepSpeed frees and gathers them. The parameter with one element is padded to two shards.
        gathered = sum(kind.bytes for name, kind in traffic.items() if "gather" in name)
        assert gathered == 4 * (DIM + DIM + 2)
        assert elements == [0, DIM, DIM, 1]
        assert all((weights[name] == expected[name]).all() for name in expected)
    path = tmp_path / "checkpoint_e0_b2"
    model_states = torch.load(path / "engine" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert all(tensor.numel() == 0 for tensor in model_states["module"].values())


class ListCheckpoints(TrainerCallback):
    """What a callback finds that copies the directory in the end."""

    def on_end(self, *args: Any, **kwargs: Any) -> None:
        self.found = sorted(path.name for path in Path(self.serialization_dir).glob("checkpoint*"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_checkpoints_are_committed_when_callbacks_end(world_size: int, tmp_path: Path) -> None:
    def train_and_list(trainer: Any) -> List[str]:
        trainer.train()
        (callback,) = (each for each in trainer.callbacks if isinstance(each, ListCheckpoints))
        return callback.found

    side = Side(
        TwoLayers,
        batches,
        2,
        world_size,
        callbacks=lambda: [ListCheckpoints(str(tmp_path))],
        checkpointer=DeepSpeedCheckpointer(tmp_path, keep_most_recent_by_count=2),
    )
    checkpoints = ["checkpoint_e1_b0", "checkpoint_e2_b0"]
    assert side.on_all_ranks(train_and_list, tmp_path) == [checkpoints] * world_size
