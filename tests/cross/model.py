"""
Models with the parts that a case asks for, their data, and callbacks: registered, so that a config
file can name them too.
"""

import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional

import torch
import torch.distributed as dist
from allennlp.common.util import is_distributed
from allennlp.data import DatasetReader, Instance, Vocabulary
from allennlp.data.fields import TensorField
from allennlp.models import Model
from allennlp.modules.seq2seq_encoders import LstmSeq2SeqEncoder
from allennlp.nn import RegularizerApplicator
from allennlp.nn.util import masked_mean
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from allennlp_deepspeed.models.contrastive import ContrastiveModel

DIM = 8
NUM_TOKENS = 6  # of the vocabulary
LENGTH = 4
NUM_FEATURES = 5
NUM_TARGETS = 3


class Body(nn.Module):
    """
    Gives each example a vector of shape `(DIM,)`.

    # Parameters

    parts : `List[str]`
        Some of `case.PARTS`.
    dropout : `float`
    """

    def __init__(self, parts: List[str], dropout: float) -> None:
        super().__init__()
        max_norm = 1.0 if "max_norm" in parts else None
        self.embedding = nn.Embedding(NUM_TOKENS, DIM, max_norm=max_norm)
        if max_norm is not None:
            # Longer vectors would be changed more by their first use than by training.
            nn.init.normal_(self.embedding.weight, std=0.4)
        self.lstm = LstmSeq2SeqEncoder(DIM, DIM) if "lstm" in parts else None
        self.encoder = nn.Sequential(
            nn.Linear(DIM + NUM_FEATURES, DIM), nn.Tanh(), nn.Dropout(dropout)
        )
        # The mean of what comes in is taken away, so that the layer before has no bias: its
        # gradient would be made of rounding alone.
        self.before_norm = nn.Linear(DIM, DIM, bias=False) if "batch_norm" in parts else None
        self.norm = nn.BatchNorm1d(DIM) if "batch_norm" in parts else None
        self.scale = nn.Parameter(torch.tensor(0.1)) if "scalar" in parts else None
        self.matrix = (
            nn.Parameter(torch.empty(DIM, DIM).uniform_(-0.5, 0.5)[:, : DIM // 2].t())
            if "transposed" in parts
            else None
        )
        self.conv = nn.Conv2d(2, 2, 3, padding=1) if "channels_last" in parts else None
        if self.conv is not None:
            self.conv = self.conv.to(memory_format=torch.channels_last)
        self.nothing = nn.Parameter(torch.empty(0)) if "empty" in parts else None
        self.frozen = nn.Linear(DIM, DIM) if "frozen" in parts else None
        if self.frozen is not None:
            self.frozen.requires_grad_(False)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.embedding(tokens)
        if self.lstm is not None:
            embedded = self.lstm(embedded, mask)
        pooled = masked_mean(embedded, mask.unsqueeze(-1), dim=1)
        hidden = self.encoder(torch.cat([pooled, features.to(pooled.dtype)], dim=-1))
        if self.norm is not None and self.before_norm is not None:
            hidden = torch.tanh(self.norm(self.before_norm(hidden)))
        if self.matrix is not None:
            hidden = torch.tanh(hidden + hidden @ self.matrix.t() @ self.matrix)
        if self.conv is not None:
            image = hidden.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
            hidden = hidden + self.conv(image).reshape(-1, DIM)
        if self.frozen is not None:
            hidden = hidden + self.frozen(hidden)
        if self.scale is not None:
            hidden = hidden * self.scale.exp()
        if self.nothing is not None:
            hidden = hidden + self.nothing.sum()
        return hidden


def constructed(seed: int, construct: Any) -> Any:
    """What `construct` returns, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return construct()


@Model.register("cross")
class CrossModel(Model):
    """
    Regression by one or more heads.

    # Parameters

    vocab : `Vocabulary`
    seed : `int`
        Of the weights.
    parts : `List[str]`
        Some of `case.PARTS`.
    num_heads : `int`
    dropout : `float`
    """

    def __init__(
        self,
        vocab: Vocabulary,
        seed: int,
        parts: List[str],
        num_heads: int = 1,
        dropout: float = 0.0,
        regularizer: Optional[RegularizerApplicator] = None,
    ) -> None:
        super().__init__(vocab, regularizer)

        def construct() -> None:
            self.body = Body(parts, dropout)
            self.heads = nn.ModuleList(nn.Linear(DIM, NUM_TARGETS) for _ in range(num_heads))
            self.decoder = nn.Linear(DIM, NUM_TOKENS, bias=False) if "tied" in parts else None
            if self.decoder is not None:
                self.decoder.weight = self.body.embedding.weight

        constructed(seed, construct)

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        features: torch.Tensor,
        target: torch.Tensor,
        heads: torch.Tensor,
        **kwargs: Any,
    ) -> Dict[str, torch.Tensor]:
        hidden = self.body(tokens, mask, features)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for head, is_used in zip(self.heads, heads[0].tolist()):
            if is_used:
                loss = loss + (head(hidden).float() - target).pow(2).mean()
        if self.decoder is not None:
            loss = loss + nn.functional.cross_entropy(self.decoder(hidden).float(), tokens[:, 0])
        return {"loss": loss}


@Model.register("cross_contrastive")
class CrossContrastiveModel(ContrastiveModel):
    """
    Tells the target of each example from those of the others.

    # Parameters

    vocab : `Vocabulary`
    seed : `int`
        Of the weights.
    parts : `List[str]`
        Some of `case.PARTS`.
    dropout : `float`
    """

    def __init__(
        self,
        vocab: Vocabulary,
        seed: int,
        parts: List[str],
        dropout: float = 0.0,
        regularizer: Optional[RegularizerApplicator] = None,
    ) -> None:
        super().__init__(vocab, regularizer=regularizer)

        def construct() -> None:
            self.body = Body(parts, dropout)
            self.head = nn.Linear(NUM_TARGETS, DIM)
            self.temperature = nn.Parameter(torch.tensor(0.5)) if "scalar" in parts else None

        constructed(seed, construct)

    def encode(  # type: ignore[override]
        self, tokens, mask, features, target, **kwargs: Any
    ) -> Dict[str, torch.Tensor]:
        return {"left": self.body(tokens, mask, features), "right": torch.tanh(self.head(target))}

    def contrastive_loss(  # type: ignore[override]
        self, representations: Dict[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        scores = representations["left"].float() @ representations["right"].float().t()
        if self.temperature is not None:
            scores = scores * self.temperature.float().exp()
        return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(scores)))}


def to_instance(example: Dict[str, Any]) -> Instance:
    return Instance(
        {
            "tokens": TensorField(torch.tensor(example["tokens"])),
            "mask": TensorField(torch.tensor(example["mask"])),
            "features": TensorField(torch.tensor(example["features"])),
            "target": TensorField(torch.tensor(example["target"])),
            "heads": TensorField(torch.tensor(example["heads"])),
        }
    )


@DatasetReader.register("cross")
class CrossReader(DatasetReader):
    """Reads examples in JSON lines, each of which says of which rank it is."""

    def __init__(self) -> None:
        super().__init__(manual_distributed_sharding=True)

    def _read(self, file_path: Any) -> Iterable[Instance]:
        for line in Path(file_path).read_text().splitlines():
            example = json.loads(line)
            if example["rank"] == _rank():
                yield to_instance(example)


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


class Interruption(Exception):
    """Of a training that is to be recovered."""


@TrainerCallback.register("cross")
class CrossCallback(TrainerCallback):
    """
    Records each step in a file for each rank, sets the random state, and interrupts training.

    # Parameters

    seed : `int`
        The random state of rank `i` when training starts is that of `seed + i`.
    interrupted_after : `List[int]`, optional (default = `None`)
        An epoch and a number of steps.
    """

    def __init__(
        self, serialization_dir: str, seed: int, interrupted_after: Optional[List[int]] = None
    ) -> None:
        super().__init__(serialization_dir)
        self._seed = seed
        self._interrupted_after = interrupted_after

    def on_start(self, trainer, is_primary: bool = True, **kwargs) -> None:
        path = Path(self.serialization_dir)
        self._is_second = (path / "interrupted").exists()
        # What is recovered from a checkpoint has the random state from there.
        if not (self._is_second and list(path.glob("checkpoint_*"))):
            torch.manual_seed(self._seed + _rank())

    def on_batch(
        self,
        trainer,
        batch_inputs,
        batch_outputs,
        batch_metrics,
        epoch,
        batch_number,
        is_training,
        is_primary=True,
        batch_grad_norm=None,
        **kwargs,
    ) -> None:
        if not is_training:
            return
        step = {
            "epoch": epoch,
            "step": batch_number,
            "loss": float(batch_metrics["batch_loss"]),
            "norm": None if batch_grad_norm is None else float(batch_grad_norm),
        }
        path = Path(self.serialization_dir)
        with open(path / f"steps_{_rank()}.jsonl", "a") as file:
            file.write(json.dumps(step) + "\n")
        if self._interrupted_after == [epoch, batch_number] and not self._is_second:
            (path / "interrupted").touch()
            raise Interruption(f"after epoch {epoch}, step {batch_number}")
