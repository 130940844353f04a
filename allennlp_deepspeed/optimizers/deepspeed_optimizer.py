from typing import ClassVar

from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer
from overrides import overrides

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig


class DeepSpeedOptimizer(Optimizer):
    """
    One of DeepSpeed's optimizers in AllenNLP's registry. As with AllenNLP's own, the trainer passes
    in the `model_parameters`, and a config file may write `parameter_groups`.
    """

    num_states: ClassVar[int] = 2
    """How many states of a parameter's size it keeps of each, in fp32: two, as Adam, or one."""

    @classmethod
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        """
        # Parameters

        name : `str`, required.
            That the config file gives the optimizer.
        config : `ResolvedConfig`, required.
        device_type : `str`, required.
            "cpu" or "cuda", what the model trains on.

        # Raises

        `ConfigurationError`
            If the optimizer can't step the weights where `config` has them, or not as they are
            there.
        """


class FusedOptimizer(DeepSpeedOptimizer):
    """Steps the weights on the device that the model trains on."""

    needs_gpu: ClassVar[bool] = True
    instead_on_cpu: ClassVar[str]
    """The name of an optimizer that steps weights in CPU memory."""

    @classmethod
    @overrides
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if cls.needs_gpu and device_type == "cpu":
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which needs a GPU, but the model trains "
                f'on the CPU: write "{cls.instead_on_cpu}"'
            )
        if config.offload_device != "none":
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which steps weights on the device that "
                f"the model trains on, but {ROOT}.zero_optimization.offload_optimizer.device is "
                f'"{config.offload_device}": write "{cls.instead_on_cpu}", or '
                '"offload_optimizer": null'
            )


class CPUOptimizer(DeepSpeedOptimizer):
    """Steps weights in CPU memory."""

    instead_on_gpu: ClassVar[str]
    """The name of an optimizer that steps weights on a GPU."""

    @classmethod
    @overrides
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        if device_type == "cuda" and config.offload_device == "none":
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which steps weights in CPU memory, but "
                f'they are on a GPU: write "{cls.instead_on_gpu}", or have them offloaded, for '
                f'example with "{ROOT}": "zero_2_offload"'
            )
