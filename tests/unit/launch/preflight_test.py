"""What is said of a whole config before anything is read or started."""

import json
from typing import Any, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import preflight
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, load_config


def experiment(**trainer: Any) -> Dict[str, Any]:
    config = load_config("classifier", TWO_WORKERS)
    return {**config, "trainer": {**config["trainer"], "type": "deepspeed", **trainer}}


def findings(config: Dict[str, Any]) -> List[str]:
    with pytest.raises(ConfigurationError) as error:
        preflight.check(Params(config))
    return str(error.value).splitlines()


def test_everything_that_is_wrong_is_said_at_once() -> None:
    config = experiment(
        num_epoch=2,
        log_every_num_steps=0,
        num_gradient_accumulation_steps=2,
        checkpointer={"keep_most_recent_by_count": -1, "save_every": 10},
        deepspeed_config={
            "zero_optimization": {
                "stage": 2,
                "stge": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "disk"},
            },
            "gradient_accumulation_steps": 4,
            "train_batch_size": 7,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "tensor_parallel": {"autotp_size": 2},
        },
    )
    expected = [
        "'trainer.num_epoch' is no key",
        "'trainer.log_every_num_steps' is 0",
        "'trainer.checkpointer.keep_most_recent_by_count' is -1",
        "'trainer.checkpointer.save_every' is no key",
        "deepspeed_config.tensor_parallel.autotp_size is 2",
        'deepspeed_config.zero_optimization.offload_optimizer.device is "disk"',
        "deepspeed_config.zero_optimization.stge is unknown",
        "num_gradient_accumulation_steps is 2, but deepspeed_config.gradient_accumulation_steps",
        "deepspeed_config.train_batch_size is 7",
        "deepspeed_config.bf16.enabled and deepspeed_config.fp16.enabled are true",
        'optimizer is "adam", but deepspeed_config.optimizer is "AdamW"',
        "deepspeed_config.scheduler.params.warmup_num_steps is left open",
        'deepspeed_config.zero_optimization.offload_param.device is "cpu"',
    ]
    lines = findings(config)
    assert len(lines) == len(expected), "\n".join(lines)
    for line, start in zip(lines, expected):
        assert line.startswith(start)


AUTO = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 12}


@pytest.mark.parametrize(
    "changes, start",
    [
        ({"data_loader": {"batch_size": 12}}, "data_loader.batch_size is 12, but with global_"),
        (
            {"data_loader": {"batch_sampler": {"type": "max_tokens_sampler", "max_tokens": 30}}},
            "'trainer.num_gradient_accumulation_steps' is \"auto\", but batches of 'data_loader' ",
        ),
        (
            {"model": {"type": "normalizing_classifier", "embedding_dim": 4}},
            "'trainer.num_gradient_accumulation_steps' is \"auto\", but nothing says over what the "
            "loss of a NormalizingClassifier is a mean: give the model a method 'num_loss_terms'",
        ),
    ],
)
def test_what_a_global_batch_cannot_be_had_with(changes: Dict[str, Any], start: str) -> None:
    (line,) = findings({**experiment(**AUTO), **changes})
    assert line.startswith(start)


def test_a_contrastive_model_is_pointed_to_gradient_caching() -> None:
    config = load_config("bi_encoder", TWO_WORKERS, {"data_loader": {"batch_size": 6}})
    config["trainer"].update({"type": "deepspeed", **AUTO})
    (line,) = findings(config)
    assert line.startswith("'trainer.num_gradient_accumulation_steps' is \"auto\", but the loss of")
    assert '"grad_cache": {"chunk_size": "auto"}' in line
    config["trainer"]["grad_cache"] = {"chunk_size": 2}
    (line,) = findings(config)
    assert line.startswith("'trainer.grad_cache' divides batches")


BUCKET = {"type": "bucket"}


@pytest.mark.parametrize(
    "loader",
    [
        {},
        {"batch_size": None, "batch_sampler": None},
        {"batch_sampler": BUCKET},
        {"batch_size": None, "batch_sampler": {**BUCKET, "batch_size": None}},
    ],
)
def test_the_data_loader_reads_the_share_of_a_worker(loader: Dict[str, Any]) -> None:
    params = Params({**experiment(**AUTO), "data_loader": loader})
    preflight.fill_in(params)
    preflight.check(params)
    filled = params.as_dict(quiet=True)["data_loader"]
    assert (filled.get("batch_sampler") or filled)["batch_size"] == 6


@pytest.mark.parametrize("trainer", [{}, AUTO], ids=["a number of steps", "auto"])
@pytest.mark.parametrize(
    "distributed",
    [
        {"cuda_devices": 2},
        {"cuda_devices": []},
        {"num_nodes": 1},
        {"cuda_devices": [-1], "num_nodes": "2"},
        [0],
    ],
    ids=json.dumps,
)
def test_wrong_devices_are_left_to_the_check(trainer: Any, distributed: Any) -> None:
    params = Params({**experiment(**trainer), "distributed": distributed})
    preflight.fill_in(params)
    with pytest.raises(ConfigurationError, match="distributed"):
        preflight.check(params)


def embedders(**embedders: Any) -> Dict[str, Any]:
    return {
        "type": "basic_classifier",
        "text_field_embedder": {"token_embedders": embedders},
        "seq2vec_encoder": {"type": "boe", "embedding_dim": 768},
    }


def pretrained(kind: str = "pretrained_transformer", **arguments: Any) -> Dict[str, Any]:
    return {"type": kind, "model_name": "bert-base-cased", "transformer_kwargs": arguments}


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "bfloat16"}, 'dtype\' is "bfloat16", but layers around it, and model.tar.gz'),
        ({"torch_dtype": "auto"}, 'torch_dtype\' is "auto", but layers around it'),
        ({"quantization_config": {"load_in_4bit": True}}, "but what is loaded is quantized"),
        ({"load_in_8bit": True}, "load_in_8bit' is true, but what is loaded is quantized"),
        ({"device_map": "auto"}, 'device_map\' is "auto", but the engine itself puts the model'),
        ({"attn_implementation": "flex_attention"}, "PyTorch has no backward pass of it on the"),
        ({"attn_implementation": "flash_attention_2"}, 'is for GPUs: train on one, or write "s'),
    ],
    ids=str,
)
@pytest.mark.parametrize("deepspeed_config", ["zero_3", {"type": "zero_2", **BF16}], ids=str)
def test_what_an_engine_cannot_train_is_not_loaded(
    arguments: Dict[str, Any], message: str, deepspeed_config: Any
) -> None:
    adapted = {"type": "lora", "embedder": pretrained("pretrained_transformer_mismatched")}
    adapted["embedder"]["transformer_kwargs"] = arguments
    for embedder, path in ((pretrained(**arguments), "tokens"), (adapted, "tokens.embedder")):
        config = experiment(deepspeed_config=deepspeed_config)
        (line,) = findings({**config, "model": embedders(tokens=embedder)})
        path = f"'model.text_field_embedder.token_embedders.{path}.transformer_kwargs."
        assert line.startswith(path)
        assert message in line


def test_other_arguments_of_transformers_are_taken() -> None:
    taken = {"attn_implementation": "sdpa", "dtype": "float32", "revision": "v1"}
    frozen = pretrained(attn_implementation="flex_attention", load_in_4bit=False)
    frozen["train_parameters"] = False
    config = experiment(deepspeed_config=BF16)
    model = embedders(tokens=pretrained(**taken), others=frozen)
    preflight.check(Params({**config, "model": model}))


@pytest.mark.parametrize(
    "deepspeed_config, dtype, is_adapted, wanted",
    [
        ("zero_2", "bfloat16", False, 'has it trained in fp32: write "float32"'),
        (BF16, "float16", False, 'has it trained in bf16: write "bfloat16"'),
        (BF16, "bfloat16", False, None),
        ("zero_2", "bfloat16", True, None),
        ("zero_2", "auto", False, None),
    ],
)
def test_a_model_that_is_one_transformer_is_in_the_precision_of_the_engine(
    deepspeed_config: Any, dtype: str, is_adapted: bool, wanted: Any
) -> None:
    model = {**pretrained("causal_lm", dtype=dtype), **({"lora": {"r": 2}} if is_adapted else {})}
    config = {**experiment(deepspeed_config=deepspeed_config), "model": model}
    config["trainer"]["validation_metric"] = "-loss"
    if wanted is None:
        preflight.check(Params(config))
    else:
        assert [wanted in line for line in findings(config)] == [True]
