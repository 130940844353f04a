from copy import deepcopy
from typing import Any, Callable, ClassVar, Dict, Optional, Union

from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from overrides import overrides

from allennlp_deepspeed.config import resolution as config_resolution
from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.keys import did_you_mean
from allennlp_deepspeed.config.schema_validation import ROOT, validate
from allennlp_deepspeed.config.settings import ResolvedConfig, TrainerSettings
from allennlp_deepspeed.config.values import as_json

__all__ = ["DeepSpeedConfig", "ResolvedConfig", "TrainerSettings"]

_PARTITIONING = ("aio", "bf16", "data_types", "fp16", "torch_autocast", "zero_optimization")


class DeepSpeedConfig(Registrable):
    """
    DeepSpeed's configuration in [its own schema](https://www.deepspeed.ai/docs/config-json).

    In a config file it is that schema as it is, pasted or imported; the name of a preset; or a
    preset with changes, which are merged deeply:

    ```jsonnet
    "deepspeed_config": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}
    "deepspeed_config": import "ds_config.json"
    "deepspeed_config": "zero_2"
    "deepspeed_config": {"type": "zero_3_offload", "bf16": {"enabled": true}}
    ```

    The value "auto", or no value at all, leaves a key to the AllenNLP side of the config file. The
    ZeRO stage is 2 unless something here says otherwise, wherever it comes from: with
    `{"bf16": {"enabled": true}}`, with `{"zero_optimization": {}}` and with nothing at all. To
    register a preset of your own, give a subclass its own `preset`.

    # Parameters

    config : `Dict[str, Any]`, optional (default = `None`)
        In DeepSpeed's schema, merged over the preset. `None` for a section removes it.

    What is wrong with it `resolve` says, along with what contradicts the AllenNLP side.
    """

    default_implementation = "ds_config"

    preset: ClassVar[Dict[str, Any]] = {}

    def __init__(self, config: Optional[Dict[str, Any]] = None) -> None:
        merged = self.merge(self.preset, config or {})
        self.config = {key: value for key, value in merged.items() if value is not None}

    @classmethod
    def of(cls, value: Union[str, Dict[str, Any], "DeepSpeedConfig", None]) -> "DeepSpeedConfig":
        """
        The configuration that a user means.

        # Parameters

        value : `Union[str, Dict[str, Any], DeepSpeedConfig, None]`
            A preset's name; DeepSpeed's schema, with the name of a preset to change under "type" or
            without; a configuration already made; or `None`, which is `"zero_2"`.

        # Raises

        `ConfigurationError`
            If there is no such preset.
        """
        if isinstance(value, DeepSpeedConfig):
            return value
        if isinstance(value, str) or value is None:
            value = {"type": value or "zero_2"}
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{ROOT} is {value!r}: must be a preset's name, or an object in DeepSpeed's schema"
            )
        config = dict(value)
        name = config.pop("type", DeepSpeedConfig.default_implementation)
        presets = DeepSpeedConfig.list_available()
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{ROOT}.type is {as_json(name)}: must be a preset's name ({', '.join(presets)})"
            )
        # A name with a dot is the path to a class, as everywhere in AllenNLP.
        if name not in presets and ("." not in name or name.endswith(".json")):
            hint = did_you_mean(name, presets)
            if name.endswith(".json"):
                hint = f'to read a file write `import "{name}"`, without quotes around it'
            raise ConfigurationError(
                f'"{name}" is not a preset for {ROOT}: {hint} ({", ".join(presets)})'
            )
        return DeepSpeedConfig.by_name(name)(config)

    @classmethod
    @overrides
    def from_params(
        cls,
        params: Params,
        constructor_to_call: Optional[Callable[..., "DeepSpeedConfig"]] = None,
        constructor_to_inspect: Optional[Callable] = None,
        **extras: Any,
    ) -> "DeepSpeedConfig":
        # AllenNLP's own would look for DeepSpeed's keys in the signature of the constructor.
        config = params.as_dict(quiet=True) if isinstance(params, Params) else params
        return cls.of(config) if cls is DeepSpeedConfig else cls(config)

    @staticmethod
    def merge(config: Dict[str, Any], changes: Dict[str, Any]) -> Dict[str, Any]:
        """
        A copy of `config` with `changes` made at any depth. Only objects are merged; any other
        value, a list too, takes the place of the old one.
        """
        merged = deepcopy(config)
        for key, value in changes.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = DeepSpeedConfig.merge(merged[key], value)
            else:
                merged[key] = deepcopy(value)
        return merged

    def resolve(self, settings: TrainerSettings) -> ResolvedConfig:
        """
        Fills what is left open from the AllenNLP side, and refuses contradictions. Needs no device
        and no process group, so that a config file can be checked before any data is read. For such
        a check give a stand-in for what is not known yet, such as the `batches_per_epoch`.

        # Parameters

        settings : `TrainerSettings`
            What the AllenNLP side says.

        # Raises

        `ConfigurationError`
            If a key is unknown or has no meaning in an AllenNLP trainer, if a value is wrong, if
            both sides say something and they differ, if the settings can't work together, or if
            nothing says what an "auto" stands for. With a line for each of these; the values of
            keys are checked before the sides are compared.
        """
        findings = Findings()
        self.check_schema(findings)
        findings.raise_any()
        return config_resolution.resolve(self.config, settings)

    def check_schema(self, findings: Findings) -> None:
        """Adds to the `findings` what is wrong whatever the AllenNLP side says."""
        validate(self.config, findings)

    def partitioning(self, settings: TrainerSettings) -> Dict[str, Any]:
        """
        The sections that decide how parameters are partitioned, resolved. For constructing a model
        before there is an optimizer, which the others are about.

        # Parameters

        settings : `TrainerSettings`
            Those about precision, devices and folders.

        # Raises

        `ConfigurationError`
            As `resolve` does.
        """
        sections = {key: self.config[key] for key in _PARTITIONING if key in self.config}
        resolved = PlainConfig(sections).resolve(settings).engine_config
        return {key: resolved[key] for key in _PARTITIONING if key in resolved}


@DeepSpeedConfig.register("ds_config")
class PlainConfig(DeepSpeedConfig):
    """DeepSpeed's schema as it is. Registered as a `DeepSpeedConfig` with name "ds_config"."""


@DeepSpeedConfig.register("zero_1")
class Zero1(DeepSpeedConfig):
    """Partitions optimizer states. Registered as a `DeepSpeedConfig` with name "zero_1"."""

    preset: ClassVar[Dict[str, Any]] = {"zero_optimization": {"stage": 1}}


@DeepSpeedConfig.register("zero_2")
class Zero2(DeepSpeedConfig):
    """
    Partitions optimizer states and gradients. Registered as a `DeepSpeedConfig` with name "zero_2",
    and used where no configuration is given.
    """

    preset: ClassVar[Dict[str, Any]] = {"zero_optimization": {"stage": 2}}


@DeepSpeedConfig.register("zero_3")
class Zero3(DeepSpeedConfig):
    """
    Partitions optimizer states, gradients and parameters. Registered as a `DeepSpeedConfig` with
    name "zero_3".
    """

    preset: ClassVar[Dict[str, Any]] = {"zero_optimization": {"stage": 3}}


@DeepSpeedConfig.register("zero_2_offload")
class Zero2Offload(DeepSpeedConfig):
    """
    Like "zero_2", with optimizer states and the optimizer step on the CPU. Registered as a
    `DeepSpeedConfig` with name "zero_2_offload".
    """

    preset: ClassVar[Dict[str, Any]] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    }


@DeepSpeedConfig.register("zero_3_offload")
class Zero3Offload(DeepSpeedConfig):
    """
    Like "zero_3", with optimizer states and parameters in CPU memory. Registered as a
    `DeepSpeedConfig` with name "zero_3_offload".
    """

    preset: ClassVar[Dict[str, Any]] = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    }


@DeepSpeedConfig.register("zero_3_nvme")
class Zero3Nvme(DeepSpeedConfig):
    """
    Like "zero_3", with optimizer states and parameters in files, by default in the folder "nvme" of
    the serialization directory. Registered as a `DeepSpeedConfig` with name "zero_3_nvme".
    """

    preset: ClassVar[Dict[str, Any]] = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "nvme"},
        }
    }
