from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict

import torch
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models.model import Model
from typing_extensions import override

from evidence.contenders import causal_language_model  # noqa: F401  # registers both
from evidence.harness.process_tree import Worker
from evidence.harness.workload import SEED, Workload

_NUM_DISTINCT_TEXTS = 64  # they are repeated as often as needed


@dataclass(frozen=True)
class RandomTexts(Workload):
    """
    A decoder and texts of random tokens.

    # Parameters

    directory : `Path`
    stage : `int`
    accumulation : `int`
    batch_size : `int`
    size : `Dict[str, int]`
        The parameters of the model "causal_language_model".
    bf16 : `bool`, optional (default = `False`)
    optimizer : `Dict[str, Any]`, optional (default = `{"type": "adam", "lr": 1e-5}`)
    zero : `Dict[str, Any]`, optional (default = `{}`)
        Further keys of DeepSpeed's `zero_optimization`.
    """

    directory: Path
    stage: int
    accumulation: int
    batch_size: int
    size: Dict[str, int]
    bf16: bool = False
    optimizer: Dict[str, Any] = field(default_factory=lambda: {"type": "adam", "lr": 1e-5})
    zero: Dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"decoder, stage {self.stage}, accumulation {self.accumulation}"

    @override
    def prepare(self, world_size: int) -> None:
        pass

    @override
    def build_data_loader(self, worker: Worker) -> DataLoader:
        prepare_environment(Params({"pytorch_seed": SEED}))
        reader = {key: self.size[key] for key in ("vocab_size", "num_tokens")}
        data_loader = DataLoader.from_params(
            Params(
                {
                    "batch_size": self.batch_size,
                    "batches_per_epoch": worker.plan.total * self.accumulation,
                    "quiet": True,
                }
            ),
            reader=DatasetReader.from_params(Params({"type": "random_tokens", **reader})),
            data_path=str(_NUM_DISTINCT_TEXTS * worker.world_size),
        )
        data_loader.index_with(Vocabulary())
        data_loader.set_target_device(worker.device)
        return data_loader

    @override
    def build_model(self) -> Model:
        prepare_environment(Params({"random_seed": SEED, "numpy_seed": SEED, "pytorch_seed": SEED}))
        size = {"type": "causal_language_model", **self.size}
        model = Model.from_params(Params(size), vocab=Vocabulary())
        if self.bf16:
            # DeepSpeed alone copies its fp32 master weights from those in bf16, this package from
            # those of the model. Rounded here, they are the same.
            model.to(torch.bfloat16).to(torch.float32)
        return model

    @override
    def deepspeed_config(self, world_size: int) -> Dict[str, Any]:
        config = super().deepspeed_config(world_size)
        config["zero_optimization"].update(self.zero)
        return {**config, "bf16": {"enabled": self.bf16}}
