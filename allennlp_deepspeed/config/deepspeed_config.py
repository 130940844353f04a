from copy import deepcopy
from typing import Any, Callable, ClassVar, Dict, Optional, Union

from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from typing_extensions import override

from allennlp_deepspeed.config import resolution as config_resolution
from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.json_types import as_json
from allennlp_deepspeed.config.key_validation import did_you_mean
from allennlp_deepspeed.config.schema_validation import ROOT, validate
from allennlp_deepspeed.config.settings import ResolvedConfig, TrainerSettings

__all__ = ["DeepSpeedConfig", "ResolvedConfig", "TrainerSettings"]

_PARTITIONING = ("aio", "bf16", "data_types", "fp16", "torch_autocast", "zero_optimization")


class DeepSpeedConfig(Registrable):
    """
    DeepSpeed's configuration in [its own schema](https://www.deepspeed.ai/docs/config-json).

    In a config file it is that schema unchanged, pasted or imported; the name of a preset; or a
    preset with changes, which are merged deeply:

    ```jsonnet
    "deepspeed_config": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}
    "deepspeed_config": import "ds_config.json"
    "deepspeed_config": "zero_2"
    "deepspeed_config": {"type": "zero_3_offload", "bf16": {"enabled": true}}
    ```

    A key that is "auto" or unset is filled from the AllenNLP side of the config file. The default
    ZeRO stage is 2, for any form of the configuration: with `{"bf16": {"enabled": true}}`, with
    `{"zero_optimization": {}}` and without any. To register a preset of your own, set `preset` in a
    subclass.

    # Parameters

    config : `Dict[str, Any]`, optional (default = `None`)
        A configuration in DeepSpeed's schema, which is merged over the preset. `None` for a section
        removes it.

    The constructor doesn't validate it. `resolve` does, and refuses contradictions with the
    AllenNLP side.
    """

    default_implementation = "ds_config"

    preset: ClassVar[Dict[str, Any]] = {}

    def __init__(self, config: Optional[Dict[str, Any]] = None) -> None:
        merged = self.merge(self.preset, config or {})
        self.config = {key: value for key, value in merged.items() if value is not None}

    @classmethod
    def from_value(
        cls, value: Union[str, Dict[str, Any], "DeepSpeedConfig", None]
    ) -> "DeepSpeedConfig":
        """
        Constructs the configuration from any form that a user can write.

        # Parameters

        value : `Union[str, Dict[str, Any], DeepSpeedConfig, None]`
            The name of a preset; DeepSpeed's schema, optionally with the name of the preset that it
            changes as "type"; a constructed configuration; or `None`, which is `"zero_2"`.

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
                f"'{ROOT}' is {as_json(value)}: must be the name of a preset, or an object in "
                "DeepSpeed's schema"
            )
        config = dict(value)
        name = config.pop("type", DeepSpeedConfig.default_implementation)
        presets = DeepSpeedConfig.list_available()
        if not isinstance(name, str):
            raise ConfigurationError(
                f"'{ROOT}.type' is {as_json(name)}: must be the name of a preset "
                f"({', '.join(presets)})"
            )
        # A name with a dot is the path of a class, as everywhere in AllenNLP.
        if name not in presets and ("." not in name or name.endswith(".json")):
            # Lightning's strategies, such as "deepspeed_stage_2_offload".
            hint = did_you_mean(name.replace("deepspeed_stage_", "zero_"), presets)
            if name.endswith(".json"):
                hint = f'to read a file write `import "{name}"`, without quotes around the whole'
            raise ConfigurationError(f"'{ROOT}' is \"{name}\", which is not a preset: {hint}")
        return DeepSpeedConfig.by_name(name)(config)

    @classmethod
    @override
    def from_params(
        cls,
        params: Params,
        constructor_to_call: Optional[Callable[..., "DeepSpeedConfig"]] = None,
        constructor_to_inspect: Optional[Callable] = None,
        **extras: Any,
    ) -> "DeepSpeedConfig":
        # AllenNLP's implementation would look for DeepSpeed's keys in the signature of the
        # constructor.
        config = params.as_dict(quiet=True) if isinstance(params, Params) else params
        return cls.from_value(config) if cls is DeepSpeedConfig else cls(config)

    @staticmethod
    def merge(config: Dict[str, Any], changes: Dict[str, Any]) -> Dict[str, Any]:
        """
        Returns a copy of `config` with `changes` merged at any depth. Only objects are merged. Any
        other value, including a list, replaces the old one.
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
        Fills unset keys from the AllenNLP side, and refuses contradictions. Needs no device and no
        process group, so a config file can be checked before data are read. For such a check, pass
        stand-ins for unknown values, such as the `batches_per_epoch`.

        # Parameters

        settings : `TrainerSettings`
            The settings of the AllenNLP side.

        # Raises

        `ConfigurationError`
            If a key is unknown or has no meaning in an AllenNLP trainer, if a value is wrong, if
            the two sides set different values, if the settings are incompatible, or if an "auto"
            can't be filled. The message has a line for each of these. The values of keys are
            checked before the two sides are compared.
        """
        errors = ConfigErrors()
        validate(self.config, errors)
        errors.raise_any()
        return config_resolution.resolve(self.config, settings)

    def partitioning(self, settings: TrainerSettings) -> Dict[str, Any]:
        """
        Resolves the sections that decide how parameters are partitioned. A model can be constructed
        with them before there is an optimizer, which the other sections depend on.

        # Parameters

        settings : `TrainerSettings`
            The settings of precision, devices and directories.

        # Raises

        `ConfigurationError`
            For the same reasons as `resolve`.
        """
        sections = {key: self.config[key] for key in _PARTITIONING if key in self.config}
        resolved = PlainConfig(sections).resolve(settings).engine_config
        return {key: resolved[key] for key in _PARTITIONING if key in resolved}


@DeepSpeedConfig.register("ds_config")
class PlainConfig(DeepSpeedConfig):
    """DeepSpeed's schema, unchanged. Registered as a `DeepSpeedConfig` with name "ds_config"."""


@DeepSpeedConfig.register("zero_1")
class Zero1(DeepSpeedConfig):
    """Partitions optimizer states. Registered as a `DeepSpeedConfig` with name "zero_1"."""

    preset: ClassVar[Dict[str, Any]] = {"zero_optimization": {"stage": 1}}


@DeepSpeedConfig.register("zero_2")
class Zero2(DeepSpeedConfig):
    """
    Partitions optimizer states and gradients. Registered as a `DeepSpeedConfig` with name "zero_2".
    This is the default.
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
    Offloads the optimizer states and the optimizer step of "zero_2" to the CPU. Registered as a
    `DeepSpeedConfig` with name "zero_2_offload".
    """

    preset: ClassVar[Dict[str, Any]] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    }


@DeepSpeedConfig.register("zero_3_offload")
class Zero3Offload(DeepSpeedConfig):
    """
    Offloads the optimizer states and parameters of "zero_3" to CPU memory. Registered as a
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
    Offloads the optimizer states and parameters of "zero_3" to files, by default in the directory
    "nvme" of the serialization directory. Registered as a `DeepSpeedConfig` with name
    "zero_3_nvme".
    """

    preset: ClassVar[Dict[str, Any]] = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "nvme"},
        }
    }
