import json
import logging
from typing import Any, ClassVar, Optional

import pytest
from allennlp.common import FromParams, Params
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime import config as ds_config
from deepspeed.runtime.config import DeepSpeedConfig as EngineConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from allennlp_deepspeed.config.deepspeed_config import (
    DeepSpeedConfig,
    ResolvedConfig,
    TrainerSettings,
)
from allennlp_deepspeed.config.schema import Schema
from allennlp_deepspeed.config.unsupported_keys import UNSUPPORTED

PRESETS = {
    "zero_1": (1, None, None),
    "zero_2": (2, None, None),
    "zero_3": (3, None, None),
    "zero_2_offload": (2, "cpu", None),
    "zero_3_offload": (3, "cpu", "cpu"),
    "zero_3_nvme": (3, "nvme", "nvme"),
}

# As Hugging Face's trainer fills it in.
HUGGING_FACE_CONFIG = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": 10,
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "auto"},
        "reduce_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}

HUGGING_FACE_SETTINGS = {
    "learning_rate": 5e-5,
    "num_epochs": 3,
    "batches_per_epoch": 100,
    "micro_batch_size": 8,
    "num_gradient_accumulation_steps": 4,
    "grad_norm": 1.0,
    "use_amp": True,
    "serialization_dir": "out",
}

STAGE_0 = {"zero_optimization": {"stage": 0}}

WITHOUT_BF16 = {"device_type": "cuda", "bf16_supported": False}

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}

# The keys of "zero_optimization" that tests of this package train with. One that DeepSpeed adds is
# tested, or refused by `support`.
TESTED = {
    "allgather_bucket_size",
    "compute_grad_norm",
    "contiguous_gradients",
    "enable_sanity_checks",
    "leaf_module",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "save_muon_momentum_buffer_in_memory",
    "stage",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
}


class HasConfig(FromParams):
    def __init__(self, deepspeed_config: Optional[DeepSpeedConfig] = None) -> None:
        self.config = DeepSpeedConfig.from_value(deepspeed_config).config


def resolve(config: Any = None, **settings: Any) -> ResolvedConfig:
    return DeepSpeedConfig.from_value(config).resolve(TrainerSettings(**settings))


def refusal(config: Any, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        resolve(config, **settings)
    return str(error.value)


def contains_auto(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(contains_auto, value.values()))
    return value == "auto"


class TestWhatAConfigFileCanHold:
    @pytest.mark.parametrize(
        "value, expected",
        [
            ("zero_2", {"zero_optimization": {"stage": 2}}),
            (
                {"type": "zero_2_offload", "bf16": {"enabled": True}},
                {
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                    "bf16": {"enabled": True},
                },
            ),
            ({"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 1}}),
            ({}, {}),
            (None, {"zero_optimization": {"stage": 2}}),
        ],
    )
    def test_a_preset_a_changed_preset_or_the_plain_schema(self, value, expected):
        assert HasConfig.from_params(Params({"deepspeed_config": value})).config == expected

    def test_a_file_of_deepspeeds_can_be_imported(self, tmp_path):
        (tmp_path / "ds_config.json").write_text(json.dumps(HUGGING_FACE_CONFIG))
        (tmp_path / "config.jsonnet").write_text(
            '{"deepspeed_config": (import "ds_config.json") + {"optimizer": null}}'
        )
        config = HasConfig.from_params(Params.from_file(str(tmp_path / "config.jsonnet"))).config
        assert config == {k: v for k, v in HUGGING_FACE_CONFIG.items() if k != "optimizer"}


class TestInPython:
    def test_resolving_changes_neither_the_configuration_nor_the_dictionary_it_came_from(self):
        source = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
        config = DeepSpeedConfig(source)
        config.resolve(TrainerSettings(use_amp=True))
        assert (
            config.config
            == source
            == {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
        )


class TestPresets:
    @pytest.mark.parametrize("name", PRESETS)
    def test_a_preset_is_what_its_name_says(self, name):
        stage, optimizer_device, parameter_device = PRESETS[name]
        resolved = resolve(name, serialization_dir="out")
        zero = EngineConfig(resolved.engine_config).zero_config
        assert resolved.zero_stage == zero.stage == stage
        assert (zero.offload_optimizer and zero.offload_optimizer.device) == optimizer_device
        assert (zero.offload_param and zero.offload_param.device) == parameter_device

    @pytest.mark.parametrize(
        "config",
        [
            None,
            {"zero_optimization": {}},
            {"zero_optimization": {"stage": "auto"}},
            {"type": "zero_3", "zero_optimization": None},
        ],
    )
    def test_the_stage_is_2_unless_something_says_otherwise(self, config, caplog):
        with caplog.at_level(logging.INFO, logger="allennlp_deepspeed"):
            resolved = resolve(config)
        assert resolved.zero_stage == EngineConfig(resolved.engine_config).zero_config.stage == 2
        assert "deepspeed_config.zero_optimization.stage = 2" in caplog.text
        partitioning = DeepSpeedConfig.from_value(config).partitioning(TrainerSettings())
        assert partitioning["zero_optimization"]["stage"] == 2

    def test_all_presets_are_listed(self):
        assert set(DeepSpeedConfig.list_available()) == {"ds_config", *PRESETS}


class TestUnknownKeys:
    def test_every_key_that_deepspeed_reads_is_known(self):
        class Recorder(dict):
            asked: ClassVar = set()

            def get(self, key, default=None):
                self.asked.add(key)
                return super().get(key, default)

            def __contains__(self, key):
                self.asked.add(key)
                return super().__contains__(key)

            def keys(self):
                return self

        EngineConfig(Recorder(train_batch_size=1))
        removed = {*ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
        assert len(Recorder.asked) > 40
        assert Recorder.asked - removed <= set(Schema.model_fields)


class TestWrongValues:
    @pytest.mark.parametrize("optimizer", ["ADAMW", "Lion", "RMSprop"])
    def test_deepspeeds_optimizers_in_any_case_and_torchs_are_accepted(self, optimizer):
        assert resolve({"optimizer": {"type": optimizer}}).has_optimizer

    def test_what_cannot_work_is_accepted_where_it_is_turned_off(self):
        off = {
            "autotuning": {"enabled": False},
            "hybrid_engine": {"enabled": False},
            "compile": {"deepcompile": False},
            "prescale_gradients": False,
            "zero_optimization": {"allgather_partitions": True, "round_robin_gradients": False},
        }
        assert resolve({**off, "dataloader_drop_last": False}).zero_stage == 2

    def test_every_key_of_deepspeeds_is_tested_or_refused_with_a_reason(self):
        zero = {field.alias or key for key, field in DeepSpeedZeroConfig.model_fields.items()}
        refused = {path.rpartition("zero_optimization.")[2] for path in UNSUPPORTED}
        assert zero - refused == TESTED
        assert {path.partition(".")[0] for path in UNSUPPORTED} <= {*Schema.model_fields}


class TestBatchSizes:
    def test_the_engine_never_accumulates_and_the_trainer_is_told_to(self):
        resolved = resolve(
            {"gradient_accumulation_steps": 4, "train_batch_size": 64},
            micro_batch_size=8,
            world_size=2,
        )
        assert resolved.num_gradient_accumulation_steps == 4
        assert resolved.engine_config["gradient_accumulation_steps"] == 1
        assert resolved.engine_config["train_micro_batch_size_per_gpu"] == 8
        assert resolved.engine_config["train_batch_size"] == 16

    @pytest.mark.parametrize("deepspeed", [None, "auto", 3])
    @pytest.mark.parametrize("allennlp", [None, 3])
    def test_either_side_sets_the_accumulation(self, deepspeed, allennlp):
        config = {} if deepspeed is None else {"gradient_accumulation_steps": deepspeed}
        resolved = resolve(config, num_gradient_accumulation_steps=allennlp)
        expected = 3 if 3 in (deepspeed, allennlp) else 1
        assert resolved.num_gradient_accumulation_steps == expected

    def test_with_auto_the_engine_sees_the_share_of_a_worker(self):
        resolved = resolve(
            {"gradient_accumulation_steps": "auto", "train_batch_size": 16},
            num_gradient_accumulation_steps="auto",
            global_batch_size=16,
            micro_batch_size=8,
            world_size=2,
        )
        assert resolved.finds_micro_batch_size and resolved.accumulates
        assert resolved.num_gradient_accumulation_steps == 1
        assert resolved.engine_config["train_micro_batch_size_per_gpu"] == 8

    def test_the_total_says_which_factor_is_left_open(self):
        total = {"train_batch_size": 64}
        accumulating = resolve(total, micro_batch_size=8, world_size=2)
        assert accumulating.num_gradient_accumulation_steps == 4
        sized = resolve(total, num_gradient_accumulation_steps=4, world_size=2)
        assert sized.engine_config["train_micro_batch_size_per_gpu"] == 8


class TestGradientNorm:
    @pytest.mark.parametrize(
        "clipping, grad_norm, expected, engine_clipping",
        [
            (None, None, False, 0.0),
            ("auto", False, False, 0.0),
            (1.0, None, 1.0, 1.0),
            ("auto", 0.5, 0.5, 0.5),
            (None, True, True, 0.0),
            (None, 1, 1, 1),
        ],
    )
    def test_clipping_is_always_written_out(self, clipping, grad_norm, expected, engine_clipping):
        config = {} if clipping is None else {"gradient_clipping": clipping}
        resolved = resolve(config, grad_norm=grad_norm)
        assert resolved.grad_norm == expected
        assert isinstance(resolved.grad_norm, bool) == isinstance(expected, bool)
        assert resolved.engine_config["gradient_clipping"] == engine_clipping


class TestPrecision:
    @pytest.mark.parametrize(
        "config, settings, expected",
        [
            ({}, {}, "fp32"),
            ({"bf16": {"enabled": True}}, {}, "bf16"),
            ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast"),
            ({}, {"use_amp": True}, "torch_autocast"),
            ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {}, "fp32"),
            ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {"use_amp": True}, "bf16"),
            (
                {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
                {"use_amp": True, "bf16_supported": False, "device_type": "cuda"},
                "fp16",
            ),
            ({"type": "zero_2"}, {"use_amp": True, **WITHOUT_BF16}, "fp16"),
            (STAGE_0, {"use_amp": True, **WITHOUT_BF16}, "torch_autocast"),
            ({"fp16": {"enabled": True}}, {}, "fp16"),
        ],
    )
    def test_one_precision_is_chosen_and_the_others_are_off(self, config, settings, expected):
        resolved = resolve(config, **settings)
        assert resolved.precision == expected
        engine_config = EngineConfig(resolved.engine_config)
        assert engine_config.bfloat16_config.enabled == (expected == "bf16")
        assert engine_config.float16_config.enabled == (expected == "fp16")
        assert engine_config.torch_autocast_enabled == (expected == "torch_autocast")

    @pytest.mark.parametrize(
        "settings, dtype",
        [
            ({"device_type": "cpu"}, "bfloat16"),
            ({"device_type": "cuda"}, "bfloat16"),
            (WITHOUT_BF16, "float16"),
        ],
    )
    def test_autocast_takes_the_type_that_the_device_supports(self, settings, dtype):
        autocast = resolve(STAGE_0, use_amp=True, **settings).engine_config["torch_autocast"]
        assert autocast == {"enabled": True, "dtype": dtype}

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("settings", [{}, {"device_type": "cuda"}])
    def test_autocast_to_fp16_is_refused_where_deepspeed_shards(self, stage, settings):
        autocast = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
        message = refusal({"zero_optimization": {"stage": stage}, **autocast}, **settings)
        assert f"torch_autocast.dtype' is float16, but at ZeRO stage {stage}" in message
        assert 'write "fp16": {"enabled": true}' in message
        assert resolve({**STAGE_0, **autocast}, **settings).precision == "torch_autocast"

    @pytest.mark.parametrize("optimizer", ["multi", "MultiOptimizer"])
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_half_precision_is_refused_for_several_optimizers_at_stage_0(
        self, optimizer, precision
    ):
        config = {**STAGE_0, precision: {"enabled": True}}
        message = refusal(config, optimizer=optimizer)
        assert f'deepspeed_config.{precision}\': write "torch_autocast"' in message
        autocast = {**STAGE_0, "torch_autocast": {"enabled": True}}
        assert resolve(autocast, optimizer=optimizer).precision == "torch_autocast"

    def test_without_grad_scaling_fp16_has_a_loss_scale_of_one(self):
        gpu = {"device_type": "cuda", "grad_scaling": False}
        for loss_scale in ({}, {"loss_scale": "auto"}, {"loss_scale": 1}):
            fp16 = {"enabled": True, **loss_scale}
            assert resolve({"fp16": fp16}, **gpu).engine_config["fp16"]["loss_scale"] == 1


class TestOptimizerAndScheduler:
    def test_deepspeed_builds_what_its_sections_name(self):
        warmup = {"scheduler": {"type": "WarmupLR"}}
        resolved = [resolve(config) for config in ({}, ADAMW, {**ADAMW, **warmup})]
        assert [r.has_optimizer for r in resolved] == [False, True, True]
        assert [r.has_scheduler for r in resolved] == [False, False, True]

    @pytest.mark.parametrize("has_optimizer", [False, True])
    def test_any_optimizer_can_be_sharded_and_offloaded(self, has_optimizer):
        config = {"type": "zero_2_offload", **(ADAMW if has_optimizer else {})}
        engine_config = resolve(config).engine_config
        assert engine_config["zero_allow_untested_optimizer"] is True
        assert engine_config["zero_force_ds_cpu_optimizer"] is has_optimizer

    def test_a_required_number_of_steps_need_not_be_written(self):
        scheduler = {"scheduler": {"type": "WarmupCosineLR"}}
        params = resolve(scheduler, num_epochs=2, batches_per_epoch=5).engine_config["scheduler"]
        assert params["params"] == {"total_num_steps": 10}


class TestReshardAfterMicroBatch:
    ZERO_3 = {"zero_optimization": {"stage": 3}}
    ON_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}

    def test_auto_is_found_where_there_is_something_to_gain(self):
        def reshards(config=self.ZERO_3, world_size=4, **settings):
            settings = {"serialization_dir": "out", **settings}
            return resolve(config, world_size=world_size, **settings).reshard_after_micro_batch

        assert reshards() == reshards(reshard_after_micro_batch="auto") == "auto"
        assert reshards({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}) == "auto"
        for stage in (0, 1, 2):
            assert reshards({"zero_optimization": {"stage": stage}}) is True
        assert reshards(self.ON_NVME) is reshards(self.HPZ) is reshards(world_size=1) is True
        finds = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 8}
        assert reshards(**finds) is True

    def test_an_evaluation_gathers_once_in_a_single_process_too(self):
        def reshards(config=self.ZERO_3, world_size=1, **settings):
            settings = {"serialization_dir": "out", **settings}
            return resolve(config, world_size=world_size, **settings).reshard_in_evaluation

        assert reshards() == reshards(world_size=4) == "auto"
        assert reshards(reshard_after_micro_batch=False) is False
        assert reshards(reshard_after_micro_batch=True) is True
        assert reshards({"zero_optimization": {"stage": 2}}) is True
        assert reshards(self.ON_NVME) is reshards(self.HPZ, world_size=4) is True


class TestReports:
    @pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
    def test_monitors_write_to_the_serialization_directory(self, section, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        config = {section: {"enabled": True}}
        monitor = resolve(config, serialization_dir="out").engine_config[section]
        assert monitor == {"enabled": True, "output_path": "out/log", "job_name": "deepspeed"}
        said = {"enabled": True, "output_path": "elsewhere", "job_name": "mine"}
        assert resolve({section: said}, serialization_dir="out").engine_config[section] == said

    def test_a_communication_logger_that_is_off_is_off(self):
        # DeepSpeed turns it on where the section is there.
        assert "comms_logger" not in resolve({"comms_logger": {"enabled": False}}).engine_config
        assert "comms_logger" in resolve({"comms_logger": {"enabled": True}}).engine_config

    def test_deepspeeds_throughput_timer_is_off(self):
        assert not resolve({}).engine_config["timers"]["throughput"]["enabled"]
        for value in (True, "true"):
            enabled = {"timers": {"throughput": {"enabled": value}}}
            assert "timers.throughput.enabled' is true" in refusal(enabled)
        assert resolve({"timers": {"throughput": {"enabled": "false"}}})


class TestAPastedConfiguration:
    def test_everything_else_is_filled(self):
        resolved = resolve(HUGGING_FACE_CONFIG, **HUGGING_FACE_SETTINGS)
        assert not contains_auto(resolved.engine_config)
        assert resolved.num_gradient_accumulation_steps == 4
        assert (resolved.zero_stage, resolved.precision, resolved.grad_norm) == (3, "bf16", 1.0)
        assert resolved.has_optimizer and resolved.has_scheduler

        engine_config = EngineConfig(resolved.engine_config)
        assert engine_config.optimizer_params == {"lr": 5e-5}
        assert engine_config.scheduler_params == {
            "total_num_steps": 75,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 5e-5,
            "warmup_num_steps": 10,
        }
        assert str(engine_config.zero_config.offload_param.nvme_path) == "out/nvme"
        assert engine_config.zero_config.reduce_bucket_size == 5e8

    def test_a_schedule_has_the_rate_of_the_optimizer(self):
        section = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}
        resolved = resolve(
            {"scheduler": section}, **{**HUGGING_FACE_SETTINGS, "learning_rate": 2e-5}
        )
        assert EngineConfig(resolved.engine_config).scheduler_params["warmup_max_lr"] == 2e-5

    def test_what_was_filled_is_logged(self, caplog):
        with caplog.at_level(logging.INFO, logger="allennlp_deepspeed"):
            resolve("zero_2", use_amp=True, num_gradient_accumulation_steps=4)
        assert "torch_autocast.enabled = true (from trainer.use_amp)" in caplog.text
        assert (
            "deepspeed_config.gradient_accumulation_steps = 4 "
            "(from trainer.num_gradient_accumulation_steps)" in caplog.text
        )

    @pytest.mark.parametrize(
        "config, line",
        [
            ({"train_micro_batch_size_per_gpu": 4}, "gradient_accumulation_steps = 2"),
            ({"gradient_accumulation_steps": 4}, "train_micro_batch_size_per_gpu = 2"),
        ],
    )
    def test_what_follows_from_the_batch_of_a_step_is_logged(self, config, line, caplog):
        with caplog.at_level(logging.INFO, logger="allennlp_deepspeed"):
            resolve({"train_batch_size": 16, **config}, world_size=2)
        assert f"deepspeed_config.{line} (from train_batch_size)" in caplog.text

    @pytest.mark.parametrize(
        "line", ["gradient_accumulation_steps = 1 ", "gradient_clipping = 0.0 "]
    )
    def test_defaults_are_logged_unless_a_key_is_given(self, line, caplog):
        with caplog.at_level(logging.INFO, logger="allennlp_deepspeed"):
            resolve("zero_2")
            assert f"deepspeed_config.{line}" in caplog.text
            caplog.clear()
            resolve("zero_2", num_gradient_accumulation_steps=2, grad_norm=1.0)
        assert f"deepspeed_config.{line}" not in caplog.text


def test_two_numbers_are_betas():
    optimizer = {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.95]}}
    resolved = resolve({"optimizer": optimizer})
    assert EngineConfig(resolved.engine_config).optimizer_params["betas"] == [0.9, 0.95]


def test_a_dumped_state_is_logged():
    assert "log_level" not in resolve("zero_2").engine_config
    assert resolve({"dump_state": True}).engine_config["log_level"] == "info"
    assert resolve({"dump_state": True, "log_level": "debug"}).engine_config["log_level"] == "debug"
