"""Reads what a checkpoint has of each parameter, with safetensors alone."""

import json
from pathlib import Path
from typing import Dict

import torch
from safetensors import safe_open


def saved_tensors(checkpoint: Path, kind: str = "weight") -> Dict[str, torch.Tensor]:
    """The flat tensors of one kind, by parameter, each put together from the files of all ranks."""
    parts: Dict[str, Dict[int, torch.Tensor]] = {}
    for path in sorted(checkpoint.glob("state_w*.safetensors")):
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["allennlp_deepspeed"])
            for name, (start, _, _) in record["fragments"].items():
                if f"{name}|{kind}" in file.keys():  # noqa: SIM118
                    part = file.get_tensor(f"{name}|{kind}")
                    if part.numel():
                        parts.setdefault(name, {})[start] = part
    return {name: torch.cat([part for _, part in sorted(p.items())]) for name, p in parts.items()}
