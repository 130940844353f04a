"""
What newer versions of libraries lack for AllenNLP 2.10.1 to be imported and to work. Each does
nothing with a version that has it.
"""

import functools
import importlib
import math
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch


def give_huggingface_hub_its_former_classes() -> None:
    """
    Names alone: what AllenNLP does with them, `push-to-hf`, has worked with no version of the hub
    for years, and says so.

    Mends AllenNLP 2.10.1: it imports `HfFolder` and `Repository`, which huggingface_hub 1 doesn't
    have. Gone when `allennlp.common.push_to_hf` can be imported.
    """
    import huggingface_hub

    for name in ("HfFolder", "Repository"):
        if not hasattr(huggingface_hub, name):
            setattr(huggingface_hub, name, type(name, (Dropped,), {}))


class Dropped:
    """In the place of a class that `push-to-hf` uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.get_token()

    @staticmethod
    def get_token() -> str:
        raise RuntimeError(
            "AllenNLP's 'push-to-hf' needs huggingface_hub<0.10. Upload the archive with "
            "'hf upload', or use huggingface_hub.HfApi().upload_folder."
        )


def let_tokenizers_take_former_calls() -> None:
    """
    Where a tokenizer is loaded, the argument has never meant anything: AllenNLP gives it again with
    each text.

    Mends AllenNLP 2.10.1: it passes `add_special_tokens` where it loads a tokenizer, which
    transformers refuse since 4.44, and calls `encode_plus` and `build_inputs_with_special_tokens`,
    which tokenizers of transformers 5 don't have. Gone when a "pretrained_transformer" tokenizer
    and indexer can be constructed and used.
    """
    import transformers

    from_pretrained = transformers.AutoTokenizer.from_pretrained

    @functools.wraps(from_pretrained)
    def without_argument(*args: Any, add_special_tokens: Any = None, **kwargs: Any) -> Any:
        return from_pretrained(*args, **kwargs)

    transformers.AutoTokenizer.from_pretrained = without_argument  # type: ignore[method-assign]

    base = transformers.PreTrainedTokenizerBase
    for former in (encode_plus, build_inputs_with_special_tokens):
        if not hasattr(base, former.__name__):
            setattr(base, former.__name__, former)


def encode_plus(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What calling a tokenizer does now."""
    return self(*args, **kwargs)


def build_inputs_with_special_tokens(
    self: Any, token_ids_0: List[int], token_ids_1: Optional[List[int]] = None
) -> List[int]:
    """
    The special tokens that a tokenizer puts around any text, or around and between any two.

    # Parameters

    token_ids_0 : `List[int]`, required.
    token_ids_1 : `List[int]`, optional (default = `None`)

    # Returns

    `List[int]`
        The tokens of both, with special tokens.
    """
    texts = [token_ids_0] if token_ids_1 is None else [token_ids_0, token_ids_1]
    example = self(*["a"] * len(texts), return_special_tokens_mask=True)
    tokens: List[int] = []
    was_special = True
    for token, is_special in zip(example["input_ids"], example["special_tokens_mask"]):
        if is_special:
            tokens.append(token)
        elif was_special and texts:
            tokens += texts.pop(0)
        was_special = bool(is_special)
    # Where nothing is between two, or a text has no tokens of its own.
    return tokens + [token for text in texts for token in text]


def give_transformers_its_former_adamw() -> None:
    """
    Mends AllenNLP 2.10.1: its "huggingface_adamw" inherits from `transformers.AdamW`, which
    transformers 5 doesn't have. Gone when `allennlp.training.optimizers` can be imported.
    """
    # The first import of a model puts another object in the place of the module `transformers`.
    importlib.import_module("transformers.models.auto")
    transformers = sys.modules["transformers"]
    if not hasattr(transformers, "AdamW"):
        transformers.AdamW = AdamW  # type: ignore[attr-defined]


class AdamW(torch.optim.Optimizer):
    """
    Adam with decoupled weight decay ([Loshchilov and Hutter,
    2019](https://arxiv.org/abs/1711.05101), algorithm 2) as transformers had it: `eps` is added to
    the root of the second moment before the correction of its bias, and weights are decayed after
    the step.

    # Parameters

    params : `Iterable`, required.
        Parameters, or groups of them with their settings.
    lr : `float`, optional (default = `1e-3`)
    betas : `Tuple[float, float]`, optional (default = `(0.9, 0.999)`)
        Of the moving averages of the gradient and of its square.
    eps : `float`, optional (default = `1e-6`)
    weight_decay : `float`, optional (default = `0.0`)
    correct_bias : `bool`, optional (default = `True`)
        Of the moving averages, which begin with 0.
    no_deprecation_warning : `bool`, optional (default = `False`)
        Means nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        for name, value, upper in (
            ("lr", lr, math.inf),
            ("betas[0]", betas[0], 1.0),
            ("betas[1]", betas[1], 1.0),
            ("eps", eps, math.inf),
        ):
            if not 0.0 <= value < upper:
                raise ValueError(f"{name} is {value}, but must be at least 0 and below {upper}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "correct_bias": correct_bias,
            },
        )

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)
        return loss

    @staticmethod
    def _step(parameter: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients: use SparseAdam.")
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-size)
        if group["weight_decay"] > 0:
            parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
