"""What a message says to write is right."""

from typing import Any, Dict, List

import pytest

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.open_values import recorded_sources


def lines(config: Dict[str, Any], **settings: Any) -> List[str]:
    findings = Findings()
    DeepSpeedConfig.of(config).resolve_collecting(TrainerSettings(**settings), findings)
    return findings.lines


@pytest.mark.parametrize(
    "name, instead", [("OneBitAdam", "Adam"), ("ZeroOneAdam", "Adam"), ("OneBitLamb", "Lamb")]
)
def test_a_former_optimizer_has_the_one_that_does_the_same(name: str, instead: str) -> None:
    said = lines({"optimizer": {"type": name, "params": {"lr": 0.1}}})
    assert said[0].endswith(f'no longer has optimizers that compress gradients; write "{instead}"')


@pytest.mark.parametrize(
    "section",
    [{"amp": {"enabled": False, "opt_level": "O1"}}, {"eigenvalue": {"enabled": False}}],
    ids=str,
)
def test_a_former_section_that_is_turned_off_is_left_out(section: Dict[str, Any]) -> None:
    (key,) = section
    assert lines(section) == []
    (said,) = lines({key: {**section[key], "enabled": True}})
    assert said.startswith(f"deepspeed_config.{key}: ")


@pytest.mark.parametrize(
    "zero, line",
    [
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, None),
        ({"cpu_offload": False, "offload_optimizer": {"device": "none"}}, None),
        ({"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}, "remove cpu_offload"),
        ({"stage": 3, "cpu_offload_param": True}, None),
        ({"cpu_offload": "perhaps"}, 'zero_optimization.cpu_offload is "perhaps": must be'),
    ],
    ids=str,
)
def test_a_former_key_may_stand_beside_its_successor(zero: Dict[str, Any], line: Any) -> None:
    said = lines({"zero_optimization": {"stage": 2, **zero}})
    assert len(said) == (line is not None)
    assert all(line in each for each in said)


@pytest.mark.parametrize(
    "name, instead",
    [
        ("warmup_max_lr", "the learning rate of the optimizer"),
        ("warmup_min_lr", '"warmup_min_ratio"'),
        ("warmup_ratio", '"warmup_num_steps", in optimizer steps'),
        ("cosmin_ratio", '"cos_min_ratio"'),
    ],
)
def test_what_a_cosine_schedule_lacks_has_what_to_write(name: str, instead: str) -> None:
    params = {"total_num_steps": 9, name: 0.1}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    (said,) = lines(
        {"optimizer": optimizer, "scheduler": {"type": "WarmupCosineLR", "params": params}}
    )
    assert f'"params.{name}" is no parameter of WarmupCosineLR' in said and instead in said


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_params_may_be_left_open_as_a_whole(section: str) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    config[section]["params"] = "auto"
    assert lines(config) == []


def test_what_nothing_turns_on_is_not_said_to_be_from_use_amp() -> None:
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    for use_amp, fp16 in ((None, "trainer.use_amp isn't true"), (True, "bf16 is on")):
        with recorded_sources() as sources:
            assert lines(config, use_amp=use_amp) == []
        assert sources["fp16.enabled"] == f"because {fp16}"


@pytest.mark.parametrize("key", ["num_epochs", "patience", "use_amp", "activation_tiling"])
def test_a_key_of_the_trainer_is_sent_there(key: str) -> None:
    (said,) = lines({key: 3})
    is_sent = said.endswith(
        'is unknown here: it is a key of the trainer, beside "deepspeed_config"'
    )
    assert is_sent == (key != "activation_tiling")


def test_advice_about_a_precision_makes_no_next_conflict() -> None:
    types = {"data_types": {"param_dtype": "fp16"}}
    (said,) = lines({**types, "bf16": {"enabled": True}})
    assert said.endswith("the model trains in bf16: remove the key")
    (said,) = lines(types)
    assert said.endswith('remove the key, or turn on "fp16"')
    off = {"torch_autocast": {"enabled": False}, "fp16": {"enabled": False}}
    (said,) = lines(off, use_amp=True, bf16_supported=False)
    assert said.endswith('write "fp16": {"enabled": true}')


@pytest.mark.parametrize(
    "key, value",
    [
        ("gradient_clipping", "1.0"),
        ("steps_per_print", "5"),
        ("gradient_accumulation_steps", "4"),
        ("train_batch_size", "128"),
        ("train_micro_batch_size_per_gpu", "6"),
        ("zero_optimization.stage", "3"),
        ("fp16.initial_scale_power", "16"),
    ],
)
def test_a_number_is_written_without_quotes(key: str, value: str) -> None:
    section, _, name = key.rpartition(".")
    said = lines({section: {name: value}} if section else {name: value}, micro_batch_size=6)
    assert said[0].startswith(f'deepspeed_config.{key} is "{value}": must be a ')
    assert value == "yes" or said[0].endswith(
        f"number, {float(value):g} without quotes".replace("2e+08", "200000000")
    )
    assert len(said) == 1


@pytest.mark.parametrize("key, value", [("warmup_num_steps", "100"), ("warmup_max_lr", "1e-3")])
def test_so_is_one_of_a_schedule(key: str, value: str) -> None:
    params = {"warmup_num_steps": 10, "warmup_max_lr": 0.1, key: value}
    (said,) = lines({"scheduler": {"type": "WarmupLR", "params": params}})
    assert f"{key} is '{value}': must be a number, {float(value):g} without quotes" in said


def test_params_of_a_schedule_may_have_a_wrong_type_of_their_own() -> None:
    params = {"type": "WarmupLR", "warmup_max_lr": 0.1}
    (said,) = lines({"scheduler": {"type": "WarmupLR", "params": params}})
    assert '"params.type" is no parameter of WarmupLR' in said


@pytest.mark.parametrize("name", ["Muon", "muon"])
def test_an_optimizer_of_deepspeed_may_have_params_that_one_of_torch_with_its_name_lacks(
    name: str,
) -> None:
    params = {"lr": 0.02, "muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95]}
    config = {"optimizer": {"type": name, "params": params}}
    assert lines({**config, "zero_optimization": {"stage": 2}}) == []
