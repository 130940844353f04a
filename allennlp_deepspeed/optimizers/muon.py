import logging
import re
from typing import Any, ClassVar, Dict, List, Optional, Set, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer, make_parameter_groups
from overrides import overrides

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.optimizers.deepspeed_optimizer import DeepSpeedOptimizer

logger = logging.getLogger(__name__)

# By the name of the module that has them: AllenNLP's and transformers' embeddings.
_EMBEDDING = re.compile("embed|^wte$|^wpe$|^shared$", re.IGNORECASE)


@Optimizer.register("muon", constructor="with_adamw")
class MuonOptimizer(DeepSpeedOptimizer):
    """
    Muon ([Jordan et al., 2024](https://kellerjordan.github.io/posts/muon/)), which makes the steps
    of the weight matrices of hidden layers orthogonal, with AdamW for all other parameters.

    Registered as an `Optimizer` with name "muon". What is constructed is DeepSpeed's
    `MuonWithAuxAdam`. PyTorch compiles its kernels in the first step, which takes a C++ compiler
    and a minute or two; the environment variable `TORCHDYNAMO_DISABLE=1` spares it.

    # Parameters

    parameter_groups : `List[Tuple[List[str], Dict[str, Any]]]`, optional (default = `None`)
        A group can have both matrices for Muon and other parameters, and settings for both: any of
        the parameters below.
    muon_parameters : `List[str]`, optional (default = `None`)
        Regular expressions for the names of the matrices that Muon is to step. By default it steps
        all parameters of two dimensions but embeddings, which it takes from the name of their
        module, and the last one of the model, which it takes for that of the output layer. The
        log says which.
    lr, momentum : `float`, optional (default = `0.02`, `0.95`)
        Muon's.
    ns_method : `str`, optional (default = `"gram"`)
        The iteration that makes a step orthogonal: "gram", in fp16 where the device can, or
        "standard", in bf16.
    adam_lr : `float`, optional (default = `0.0003`)
    adam_betas : `Tuple[float, float]`, optional (default = `(0.9, 0.95)`)
    adam_eps : `float`, optional (default = `1e-10`)
    weight_decay : `float`, optional (default = `0.0`)
        Muon's and AdamW's.
    """

    num_states: ClassVar[int] = 2  # AdamW's. Of a matrix Muon keeps one.

    @classmethod
    def with_adamw(
        cls,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        muon_parameters: Optional[List[str]] = None,
        lr: float = 0.02,
        momentum: float = 0.95,
        ns_method: str = "gram",
        adam_lr: float = 0.0003,
        adam_betas: Tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> torch.optim.Optimizer:
        # Its module takes seconds to import, which only those who use it are to wait for.
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        settings = {
            "lr": lr,
            "momentum": momentum,
            "ns_method": ns_method,
            "adam_lr": adam_lr,
            "adam_betas": adam_betas,
            "adam_eps": adam_eps,
            "weight_decay": weight_decay,
        }
        for _, changes in parameter_groups or []:
            for key in changes:
                if key not in settings and key != "requires_grad":
                    raise ConfigurationError(
                        f"'trainer.optimizer.parameter_groups' has \"{key}\", which is no setting "
                        f'of "muon": those are {", ".join(settings)}'
                    )
        names = _matrices(model_parameters, muon_parameters)
        if not names:
            raise ConfigurationError(
                "'trainer.optimizer.type' is \"muon\", but it would step no parameter of this "
                "model: its only matrices are embeddings and the output layer, or "
                "'muon_parameters' matches none. Name some there, or write \"adamw\""
            )
        logger.info("Muon steps %s, and AdamW all others.", ", ".join(sorted(names)))
        for name, parameter in model_parameters:
            parameter.use_muon = name in names  # type: ignore[attr-defined]  # DeepSpeed reads it
        groups: List[Any] = make_parameter_groups(model_parameters, parameter_groups)
        if not parameter_groups:
            groups = [{"params": groups}]
        optimizer = MuonWithAuxAdam(
            [half for group in groups for half in _halves({**settings, **group})]
        )
        optimizer.defaults["lr"] = lr
        return optimizer

    @classmethod
    @overrides
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if config.zero_stage == 0:
            return
        if not isinstance(config.grad_norm, bool):
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\" and gradients are clipped to the norm "
                f"{config.grad_norm}, but at ZeRO stage {config.zero_stage} DeepSpeed would clip "
                f"Muon's steps instead: remove 'trainer.grad_norm' and {ROOT}.gradient_clipping, "
                'or write "zero_optimization": {"stage": 0}'
            )
        zero_config = config.engine_config["zero_optimization"]
        if config.zero_stage == 3 and zero_config["reduce_scatter"]:
            raise ConfigurationError(
                f"{ROOT}.zero_optimization.reduce_scatter is true, but Muon needs the gradient of "
                "a whole matrix: remove the key, or write false"
            )


def _matrices(
    model_parameters: List[Tuple[str, torch.nn.Parameter]], regexes: Optional[List[str]]
) -> Set[str]:
    """The names of the parameters that Muon is to step."""
    # One that ZeRO-3 has partitioned is empty, and has its shape in `ds_shape`.
    matrices = [n for n, p in model_parameters if len(getattr(p, "ds_shape", p.shape)) == 2]
    if regexes is None:
        return {name for name in matrices[:-1] if not _is_embedding(name)}
    chosen = {n for n, _ in model_parameters if any(re.search(regex, n) for regex in regexes)}
    for name in sorted(chosen.difference(matrices)):
        raise ConfigurationError(
            f"'trainer.optimizer.muon_parameters' matches {name}, which isn't a matrix: write "
            "regular expressions that match parameters of two dimensions only"
        )
    return chosen


def _is_embedding(name: str) -> bool:
    *_, module, _ = ["", *name.split(".")]
    return _EMBEDDING.search(module) is not None


def _halves(group: Dict[str, Any]) -> List[Dict[str, Any]]:
    """
    Muon's part of a group and AdamW's, without an empty one, but for AdamW's of an empty group:
    schedules for layer-wise learning rates want to see the default group.
    """
    parameters = group["params"]
    muon = {
        "params": [p for p in parameters if p.use_muon],
        "use_muon": True,
        **{key: group[key] for key in ("lr", "momentum", "ns_method", "weight_decay")},
    }
    adam = {
        "params": [p for p in parameters if not p.use_muon],
        "use_muon": False,
        "lr": group["adam_lr"],
        "betas": group["adam_betas"],
        "eps": group["adam_eps"],
        "weight_decay": group["weight_decay"],
    }
    return [half for half in (muon, adam) if half["params"]] or [adam]
