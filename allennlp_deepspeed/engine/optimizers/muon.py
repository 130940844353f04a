"""DeepSpeed's Muon in AllenNLP's registry."""

import logging
import re
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer, make_parameter_groups

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig

logger = logging.getLogger(__name__)

# Names of modules with embeddings in AllenNLP and transformers.
_EMBEDDING = re.compile("embed|^wte$|^wpe$|^shared$", re.IGNORECASE)


@Optimizer.register("muon", constructor="with_adamw")
class MuonOptimizer(Optimizer):
    """
    Muon ([Jordan et al., 2024](https://kellerjordan.github.io/posts/muon/)), which orthogonalizes
    the updates of the weight matrices of hidden layers, with AdamW for all other parameters.

    Registered as an `Optimizer` with name "muon". It constructs DeepSpeed's `MuonWithAuxAdam`.
    PyTorch compiles its kernels in the first step, which needs a C++ compiler and one or two
    minutes; the environment variable `TORCHDYNAMO_DISABLE=1` disables this.

    # Parameters

    parameter_groups : `List[Tuple[List[str], Dict[str, Any]]]`, optional (default = `None`)
        A group can have matrices for Muon and other parameters, and settings for both: any of the
        parameters below.
    muon_parameters : `List[str]`, optional (default = `None`)
        Regular expressions for the names of the matrices that Muon updates. The default is all
        two-dimensional parameters except embeddings, recognized by the name of their module, and
        the last one of the model, which is taken for the output layer. The log lists them.
    lr, momentum : `float`, optional (default = `0.02`, `0.95`)
        Muon's learning rate and momentum.
    ns_method : `str`, optional (default = `"gram"`)
        The iteration that orthogonalizes an update: "gram", in fp16 if the device supports it, or
        "standard", in bf16.
    adam_lr : `float`, optional (default = `0.0003`)
    adam_betas : `Tuple[float, float]`, optional (default = `(0.9, 0.95)`)
    adam_eps : `float`, optional (default = `1e-10`)
    weight_decay : `float`, optional (default = `0.0`)
        The weight decay of Muon and AdamW.
    """

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
        # Importing its module takes seconds, for users of Muon only.
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
                        f"'trainer.optimizer.parameter_groups' has \"{key}\", which is unknown to "
                        f'"muon": known: {", ".join(settings)}'
                    )
        names = _matrices(model_parameters, muon_parameters)
        if not names:
            raise ConfigurationError(
                "'trainer.optimizer.type' is \"muon\", but no parameter of this model is for "
                "Muon: its only matrices are embeddings and the output layer, or "
                "'muon_parameters' matches none. Write regular expressions in 'muon_parameters', "
                'or "adamw"'
            )
        logger.info(
            "Muon updates %s; AdamW updates all other parameters.", ", ".join(sorted(names))
        )
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
    def check(cls, config: ResolvedConfig, subject: str) -> None:
        """
        Checks that DeepSpeed can shard Muon.

        # Parameters

        config : `ResolvedConfig`, required.
        subject : `str`, required.
            What the message begins with.

        # Raises

        `ConfigurationError`
            If it can't, as `config` clips or reduces gradients.
        """
        if config.zero_stage == 0:
            return
        if not isinstance(config.grad_norm, bool):
            raise ConfigurationError(
                f"{subject} and the gradient norm is clipped to {config.grad_norm}, but at ZeRO "
                f"stage {config.zero_stage} DeepSpeed would clip Muon's updates instead: remove "
                f"'trainer.grad_norm' and '{ROOT}.gradient_clipping', or write "
                '"zero_optimization": {"stage": 0}'
            )
        zero_config = config.engine_config["zero_optimization"]
        if config.zero_stage == 3 and zero_config["reduce_scatter"]:
            raise ConfigurationError(
                f"'{ROOT}.zero_optimization.reduce_scatter' is true, but Muon needs unsharded "
                "gradients: remove the key, or write false"
            )


def _matrices(
    model_parameters: List[Tuple[str, torch.nn.Parameter]], regexes: Optional[List[str]]
) -> Set[str]:
    """Returns the names of the parameters that Muon updates."""
    # A parameter that ZeRO-3 has partitioned is empty, and has its shape in `ds_shape`.
    matrices = [n for n, p in model_parameters if len(getattr(p, "ds_shape", p.shape)) == 2]
    if regexes is None:
        return {name for name in matrices[:-1] if not _is_embedding(name)}
    chosen = {n for n, _ in model_parameters if any(re.search(regex, n) for regex in regexes)}
    for name in sorted(chosen.difference(matrices)):
        raise ConfigurationError(
            f"'trainer.optimizer.muon_parameters' matches {name}, which isn't a matrix: write "
            "regular expressions for parameters with two dimensions only"
        )
    return chosen


def _is_embedding(name: str) -> bool:
    *_, module, _ = ["", *name.split(".")]
    return _EMBEDDING.search(module) is not None


def _halves(group: Dict[str, Any]) -> List[Dict[str, Any]]:
    """
    Splits a group into Muon's part and AdamW's, leaving out an empty part. AdamW's part of an empty
    group stays, because layer-wise learning rate schedules need the default group.
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
