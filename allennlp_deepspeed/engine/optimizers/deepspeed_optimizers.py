"""
DeepSpeed's optimizers in AllenNLP's registry, and Lion, which PyTorch doesn't have.
"""

import logging
import re
from typing import Any, Callable, ClassVar, Dict, List, Optional, Set, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer, make_parameter_groups
from typing_extensions import override

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdam, FusedAdam

logger = logging.getLogger(__name__)

# Names of modules with embeddings in AllenNLP and transformers.
_EMBEDDING = re.compile("embed|^wte$|^wpe$|^shared$", re.IGNORECASE)


def highest_learning_rate(optimizer: torch.optim.Optimizer) -> Optional[float]:
    """
    Returns the highest learning rate of all parameter groups. `None` if the optimizer has relative
    steps, as "huggingface_adafactor" without `lr`.
    """
    rates = [group["lr"] for group in optimizer.param_groups if group["lr"] is not None]
    return max(rates, default=None)


class DeepSpeedOptimizer(Optimizer):
    """
    Base class of DeepSpeed's optimizers in AllenNLP's registry. As with AllenNLP's own, the trainer
    passes in the `model_parameters`, and a config file may write `parameter_groups`.
    """

    @classmethod
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        """
        Checks that the optimizer supports the configuration.

        # Parameters

        name : `str`, required.
            The name of the optimizer in the config file.
        config : `ResolvedConfig`, required.
        device_type : `str`, required.
            "cpu" or "cuda", the type of the training device.

        # Raises

        `ConfigurationError`
            If the optimizer can't update the weights as `config` shards and places them.
        """


class FusedOptimizer(DeepSpeedOptimizer):
    """Base class of optimizers that update the weights on the training device."""

    cpu_alternative: ClassVar[str]
    """The name of an optimizer that updates weights in CPU memory."""

    @classmethod
    @override
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if config.offload_device != "none":
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which updates weights on the GPU, but "
                f"'{ROOT}.zero_optimization.offload_optimizer.device' is "
                f'"{config.offload_device}": write "{cls.cpu_alternative}", or '
                '"offload_optimizer": null'
            )


class CPUOptimizer(DeepSpeedOptimizer):
    """Base class of optimizers that update weights in CPU memory."""

    gpu_alternative: ClassVar[str]
    """The name of an optimizer that updates weights on a GPU."""

    @classmethod
    @override
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if device_type == "cuda" and config.offload_device == "none":
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which updates weights in CPU memory, "
                f'but they are on a GPU: write "{cls.gpu_alternative}", or offload optimizer '
                'states, for example by "deepspeed_config": "zero_2_offload"'
            )


class AdamOptimizer(DeepSpeedOptimizer):
    """Base class of DeepSpeed's Adam and AdamW, which constructs them."""

    is_adamw: ClassVar[bool] = False
    default_weight_decay: ClassVar[float] = 0.0
    adamw_argument: ClassVar[str]
    """DeepSpeed's argument for `is_adamw`."""

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: Optional[float] = None,
        bias_correction: bool = True,
    ) -> None:
        settings: Dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": self.default_weight_decay if weight_decay is None else weight_decay,
            "bias_correction": bias_correction,
            self.adamw_argument: self.is_adamw,
        }
        # DeepSpeed's constructor.
        super().__init__(make_parameter_groups(model_parameters, parameter_groups), **settings)


@Optimizer.register("fused_adam")
class FusedAdamOptimizer(AdamOptimizer, FusedOptimizer, FusedAdam):
    """
    Adam with one kernel for many tensors, on GPUs and on the CPU. The numbers are those of "adam".

    Registered as an `Optimizer` with name "fused_adam".
    """

    cpu_alternative: ClassVar[str] = "cpu_adam"
    adamw_argument: ClassVar[str] = "adam_w_mode"


@Optimizer.register("fused_adamw")
class FusedAdamWOptimizer(FusedAdamOptimizer):
    """
    AdamW with one kernel for many tensors, on GPUs and on the CPU. The numbers, and the default
    weight decay, are those of "adamw".

    Registered as an `Optimizer` with name "fused_adamw".
    """

    cpu_alternative: ClassVar[str] = "cpu_adamw"
    is_adamw: ClassVar[bool] = True
    default_weight_decay: ClassVar[float] = 0.01


@Optimizer.register("cpu_adam")
class CPUAdamOptimizer(AdamOptimizer, CPUOptimizer, DeepSpeedCPUAdam):
    """
    Adam with vector instructions and all cores, for weights in CPU memory. The numbers are those of
    "adam", which it replaces automatically if optimizer states are offloaded.

    Registered as an `Optimizer` with name "cpu_adam".
    """

    gpu_alternative: ClassVar[str] = "fused_adam"
    adamw_argument: ClassVar[str] = "adamw_mode"


@Optimizer.register("cpu_adamw")
class CPUAdamWOptimizer(CPUAdamOptimizer):
    """
    AdamW with vector instructions and all cores, for weights in CPU memory. The numbers, and the
    default weight decay, are those of "adamw", which it replaces automatically if optimizer states
    are offloaded.

    Registered as an `Optimizer` with name "cpu_adamw".
    """

    gpu_alternative: ClassVar[str] = "fused_adamw"
    is_adamw: ClassVar[bool] = True
    default_weight_decay: ClassVar[float] = 0.01


@Optimizer.register("lion")
class LionOptimizer(Optimizer, torch.optim.Optimizer):
    """
    Lion ([Chen et al., 2023](https://arxiv.org/abs/2302.06675), algorithm 2), which PyTorch doesn't
    have. It works on any device, with any trainer and without a compiler.

    Registered as an `Optimizer` with name "lion".
    """

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            make_parameter_groups(model_parameters, parameter_groups),
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    @override
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], float]] = None
    ) -> Optional[float]:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                direction = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss


@Optimizer.register("muon", constructor="with_adamw")
class MuonOptimizer(DeepSpeedOptimizer):
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
    @override
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if config.zero_stage == 0:
            return
        if not isinstance(config.grad_norm, bool):
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\" and the gradient norm is clipped to "
                f"{config.grad_norm}, but at ZeRO stage {config.zero_stage} DeepSpeed would clip "
                "Muon's updates instead: remove 'trainer.grad_norm' and "
                f'\'{ROOT}.gradient_clipping\', or write "zero_optimization": {{"stage": 0}}'
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
