import math
from typing import Any, Callable, Dict, Optional

import torch
from overrides import overrides

from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdam


class CPUHuggingfaceAdamW(DeepSpeedCPUAdam):
    """
    Steps as the AdamW of transformers does, with DeepSpeed's operator for PyTorch's AdamW. They
    differ in two details: transformers' adds `eps` to the root of the second moment before the
    correction of its bias, and decays the weights after the step instead of before. Both come to
    other hyperparameters of each step.

    Not registered: it comes by itself in the place of "huggingface_adamw" where optimizer states
    are offloaded.

    # Parameters

    model_params : `List[Dict[str, Any]]`, required.
        Groups of parameters with their settings, in which `bias_correction` is transformers'
        `correct_bias`.
    """

    @torch.no_grad()
    @overrides
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        groups = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group.update(self._settings_of_step(group))
        try:
            return super().step(closure)
        finally:
            for group, settings in zip(self.param_groups, groups):
                group.update(settings)

    def _settings_of_step(self, group: Dict[str, Any]) -> Dict[str, float]:
        # Under ZeRO a group is one shard, or one after another. What it has stepped, it has whole.
        steps = 1 + max((self.state[p].get("step", 0) for p in group["params"]), default=0)
        correction = math.sqrt(1 - group["betas"][1] ** steps) if group["bias_correction"] else 1.0
        kept = 1 - group["lr"] * group["weight_decay"]  # of the weights and of the step
        return {
            "lr": group["lr"] * kept,
            "eps": group["eps"] / correction,
            "weight_decay": group["weight_decay"] / kept,
        }
