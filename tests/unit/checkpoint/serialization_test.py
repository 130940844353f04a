import enum
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from allennlp_deepspeed.checkpoint import serialization


def _by_name(member: enum.Enum, protocol: int) -> Any:
    """As Python 3.11.0 to 3.11.4 have it."""
    return getattr, (type(member), member.name)


class _Other(enum.Enum):
    MEMBER = 1


@pytest.mark.parametrize("stage", list(ZeroStageEnum))
def test_a_stage_is_loaded_whichever_python_has_saved_it(stage: ZeroStageEnum, tmp_path: Path):
    path = str(tmp_path / "states.pt")
    with mock.patch.object(enum.Enum, "__reduce_ex__", _by_name):
        assert b"getattr" in pickle.dumps(_Other.MEMBER)  # the patch is in force
        torch.save({"zero_stage": stage}, path)
    assert serialization.load(path) == {"zero_stage": stage}
