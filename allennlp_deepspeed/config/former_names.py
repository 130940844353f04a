"""
What DeepSpeed used to call its sections and keys, in configurations that are pasted today.
"""

from typing import Any, Dict, Tuple

from deepspeed.runtime import config as ds_config
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.values import as_json

ROOT = "deepspeed_config"

# What is to be in memory of the CPU, if it is true.
_OFFLOADED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def with_names_of_today(config: Dict[str, Any], findings: Findings) -> Dict[str, Any]:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        In DeepSpeed's schema of any time. It is not changed.
    findings : `Findings`, required.
        Gets a line where something is said under both names, and differs.

    # Returns

    `Dict[str, Any]`
        The same under today's names, and without sections that DeepSpeed no longer has, which it
        refuses also where they are turned off, as they are in many pasted configurations.
    """
    config = dict(config)
    if "bfloat16" in config and "bf16" not in config:
        config["bf16"] = config.pop("bfloat16")
    removed = ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    config = {k: v for k, v in config.items() if k not in removed or not _is_off(v)}
    if isinstance(config.get(ZERO_OPTIMIZATION), dict):
        zero = dict(config[ZERO_OPTIMIZATION])
        for key, section in _OFFLOADED.items():
            _rename_offload(zero, key, section, findings)
        config[ZERO_OPTIMIZATION] = zero
    return config


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, dict) and value.get("enabled") is False)


def _rename_offload(zero: Dict[str, Any], key: str, section: str, findings: Findings) -> None:
    # Anything else is for DeepSpeed's schema to refuse.
    if not isinstance(zero.get(key), bool):
        return
    is_offloaded = zero.pop(key)
    said, is_said_so = _said(zero.get(section))
    if section not in zero:
        if is_offloaded:
            zero[section] = {"device": "cpu"}
    elif is_said_so is not None and is_said_so != is_offloaded:
        path = f"{ROOT}.{ZERO_OPTIMIZATION}"
        findings.refuse(
            f"{path}.{key}",
            f"{path}.{key} is {as_json(is_offloaded)}, DeepSpeed's former key for {section}, whose "
            f"device is {as_json(said)}: remove {key}",
        )


def _said(section: Any) -> Tuple[Any, Any]:
    """The device that it names, and whether that is an offload, `None` if it isn't known."""
    device = section.get("device", "none") if isinstance(section, dict) else None
    if section is None or device == "none":
        return "none", False
    return device, True if device in ("cpu", "nvme") else None
