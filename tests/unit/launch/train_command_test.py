"""What is said of a whole config before anything is read or started."""

import json
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.commands.train import TrainModel
from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from allennlp.training import Checkpointer
from allennlp.training.trainer import Trainer
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer, DeepSpeedTrainModel
from allennlp_deepspeed.launch import train_command
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, load_config

Expect = Callable[[str], None]


def experiment(**trainer: Any) -> Dict[str, Any]:
    config = load_config("classifier", TWO_WORKERS)
    return {**config, "trainer": {**config["trainer"], "type": "deepspeed", **trainer}}


def errors_of(config: Dict[str, Any]) -> List[str]:
    with pytest.raises(ConfigurationError) as error:
        train_command.check(Params(config))
    return str(error.value).splitlines()


AUTO = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 12}


def test_a_data_loader_that_contradicts_the_global_batch_is_refused() -> None:
    (line,) = errors_of({**experiment(**AUTO), "data_loader": {"batch_size": 12}})
    assert line.startswith("'data_loader.batch_size' is 12, but with 'trainer.global_")


def test_a_contrastive_model_is_pointed_to_gradient_caching() -> None:
    config = load_config("bi_encoder", TWO_WORKERS, {"data_loader": {"batch_size": 6}})
    config["trainer"].update({"type": "deepspeed", **AUTO})
    (line,) = errors_of(config)
    assert line.startswith("'trainer.num_gradient_accumulation_steps' is \"auto\", but the loss of")
    assert '"grad_cache": {"chunk_size": "auto"}' in line
    config["trainer"]["grad_cache"] = {"chunk_size": 2}
    (line,) = errors_of(config)
    assert line.startswith("'trainer.grad_cache' and 'trainer.num_gradient_accumulation_steps'")


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
    train_command.fill_derived_keys(params)
    train_command.check(params)
    filled = params.as_dict(quiet=True)["data_loader"]
    assert (filled.get("batch_sampler") or filled)["batch_size"] == 6


@pytest.mark.parametrize(
    "distributed", [{"cuda_devices": []}, {"num_nodes": 1}, [0]], ids=json.dumps
)
def test_wrong_devices_are_left_to_the_check(distributed: Any) -> None:
    params = Params({**experiment(**AUTO), "distributed": distributed})
    train_command.fill_derived_keys(params)
    with pytest.raises(ConfigurationError, match="distributed"):
        train_command.check(params)


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
        ({"dtype": "bfloat16"}, 'dtype\' is "bfloat16", but the layers around it and model.tar.gz'),
        ({"torch_dtype": "auto"}, 'torch_dtype\' is "auto", but the layers around it'),
        (
            {"quantization_config": {"load_in_4bit": True}},
            "but the engine can't shard, average or save packed",
        ),
        ({"device_map": "auto"}, 'device_map\' is "auto", but the engine places the model'),
        ({"attn_implementation": "flex_attention"}, "which has no backward pass on the CPU"),
    ],
    ids=str,
)
def test_what_an_engine_cannot_train_is_not_loaded(arguments: Dict[str, Any], message: str) -> None:
    adapted = {"type": "lora", "embedder": pretrained("pretrained_transformer_mismatched")}
    adapted["embedder"]["transformer_kwargs"] = arguments
    for embedder, path in ((pretrained(**arguments), "tokens"), (adapted, "tokens.embedder")):
        config = experiment(deepspeed_config="zero_3")
        (line,) = errors_of({**config, "model": embedders(tokens=embedder)})
        path = f"'model.text_field_embedder.token_embedders.{path}.transformer_kwargs."
        assert line.startswith(path)
        assert message in line


def test_other_arguments_of_transformers_are_taken() -> None:
    taken = {"attn_implementation": "sdpa", "dtype": "float32", "revision": "v1"}
    frozen = pretrained(attn_implementation="flex_attention", load_in_4bit=False)
    frozen["train_parameters"] = False
    config = experiment(deepspeed_config=BF16)
    model = embedders(tokens=pretrained(**taken), others=frozen)
    train_command.check(Params({**config, "model": model}))


@pytest.mark.parametrize(
    "deepspeed_config, dtype, is_adapted, wanted",
    [
        ("zero_2", "bfloat16", False, 'trains it in fp32: write "float32"'),
        (BF16, "float16", False, 'trains it in bf16: write "bfloat16"'),
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
        train_command.check(Params(config))
    else:
        assert [wanted in line for line in errors_of(config)] == [True]


@pytest.mark.parametrize(
    "changes",
    [
        {"distributed": {"num_nodes": "2", "cuda_device": [0]}},
        {"distributed.cuda_devices": 2},
        {"trainer.cuda_device": [0, 1]},
        {"trainer.checkpointer": {"async_saves": True, "async_save": 1}, "trainer.use_amp": "no"},
        {"trainer": {"type": "deepspeed", "num_epoch": 3}},
    ],
    ids=json.dumps,
)
def test_a_misspelt_key_has_its_path_and_the_nearest(
    changes: Dict[str, Any], expect_message: Expect
) -> None:
    expect_message("\n".join(errors_of(changed(changes))))


def changed(changes: Dict[str, Any]) -> Dict[str, Any]:
    config = experiment()
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[key] = value
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"model.seq2vec_encoder.type": "allennlp.modules.seq2vec_encoders.CnnEncoder"},
        {"model.regularizer": {"regexes": [[".*", "l2"], ["bias", {"type": "l1", "alpha": 1}]]}},
        {"model.feedforward": {"_pretrained": {"archive_file": "x.tar.gz#", "module_path": "y"}}},
        {"trainer.callbacks": ["tensorboard", {"type": "wandb", "project": "p"}]},
        {"trainer.optimizer": {"type": "sgd", "lr": 1, "parameter_groups": [[["a"], {"lr": 2}]]}},
        {"trainer.learning_rate_scheduler": None},
        {"trainer.learning_rate_scheduler": {"type": "slanted_triangular"}},
    ],
    ids=json.dumps,
)
def test_what_allennlp_takes_is_taken(changes: Dict[str, Any]) -> None:
    before = {cls: dict(names) for cls, names in Registrable._registry.items()}
    train_command.check(Params(changed(changes)))
    assert {cls: dict(names) for cls, names in Registrable._registry.items()} == before


def test_unfreezing_is_refused_before_workers_start() -> None:
    triangle = {"type": "slanted_triangular", "gradual_unfreezing": True}
    for scheduler in (triangle, {"type": "combined", "schedulers": [[1, triangle]]}):
        (line,) = errors_of(changed({"trainer.learning_rate_scheduler": scheduler}))
        assert line.startswith("'trainer.learning_rate_scheduler' has \"gradual_unfreezing\": true")


@Trainer.register("own_deepspeed", constructor="from_partial_objects")
class OwnTrainer(DeepSpeedTrainer):
    """A user's."""


def test_a_subclass_is_checked_like_the_trainer_that_it_extends() -> None:
    (line,) = errors_of({**experiment(), "trainer": {"type": "own_deepspeed", "num_epoch": 3}})
    assert 'did you mean "num_epochs"' in line


@Trainer.register("own_deepspeed_with_key", constructor="from_partial_objects")
class OwnTrainerWithKey(DeepSpeedTrainer):
    """A user's, with a key of its own."""

    def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@Trainer.register("own_deepspeed_for_hours", constructor="for_hours")
class OwnTrainerForHours(DeepSpeedTrainer):
    """A user's, whose number of epochs may be unset."""

    @classmethod
    def for_hours(cls, num_epochs: Optional[int] = None, **kwargs: Any) -> "OwnTrainerForHours":
        return cls(num_epochs=num_epochs or 10**6, **kwargs)


def test_a_subclass_may_accept_other_values() -> None:
    train_command.check(Params(experiment(type="own_deepspeed_for_hours", num_epochs=None)))
    (line,) = errors_of(experiment(type="own_deepspeed_for_hours", patience=0))
    assert line.startswith("'trainer.patience' is 0")


@Checkpointer.register("own_checkpointer")
class OwnCheckpointer(DeepSpeedCheckpointer):
    """A user's."""


@TrainModel.register("own_deepspeed_loop", constructor="from_partial_objects")
class OwnLoop(DeepSpeedTrainModel):
    """A user's."""


def test_subclasses_of_users_are_checked_as_classes() -> None:
    config = experiment(
        type="own_deepspeed_with_key", alpha=0.25, checkpointer={"type": "own_checkpointer"}
    )
    test_set = {"evaluate_on_test": True, "test_data_path": config["validation_data_path"]}
    train_command.check(Params({**config, **test_set, "type": "own_deepspeed_loop"}))
    (line,) = errors_of({**config, **test_set, "type": "default"})
    assert line.startswith("'evaluate_on_test' with several workers")
    config["trainer"]["alpa"] = 1
    (line,) = errors_of(config)
    assert 'did you mean "alpha"' in line


def test_fp16_is_refused_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU_Accelerator, "supported_dtypes", lambda self: [torch.float32])
    (line,) = errors_of(experiment(deepspeed_config={"fp16": {"enabled": True}}))
    assert line.startswith("'trainer.deepspeed_config.fp16.enabled' is true, but this CPU")


@pytest.fixture
def language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as allennlp-models has it, which may be there itself."""
    entry = (type("LanguageModel", (Model,), {}), None)
    monkeypatch.setitem(Model._registry[Model], "language_model", entry)


@pytest.mark.usefixtures("language_model")
@pytest.mark.parametrize(
    "model, path",
    [
        ({"type": "language_model", "num_samples": 8, "sparse_embeddings": True}, "model.sparse_"),
        (
            {"embedder": {"words": [{"embedding_dim": 3, "sparse": True}]}},
            "model.embedder.words.0.",
        ),
    ],
)
def test_sparse_gradients_are_refused_by_their_key(model: Dict[str, Any], path: str) -> None:
    config = {**experiment(), "model": model}
    (line,) = errors_of(config)
    assert line.startswith(f"'{path}")
    config["trainer"]["deepspeed_config"] = {"zero_optimization": {"stage": 0}}
    train_command.check(Params(config))


@pytest.mark.usefixtures("language_model")
def test_a_softmax_that_is_not_sampled_has_no_sparse_gradients() -> None:
    model = {"type": "language_model", "num_samples": None, "sparse_embeddings": True}
    train_command.check(Params({**experiment(), "model": model}))


@pytest.mark.parametrize(
    "section, key, expected",
    [
        ("", "report_to", '"wandb" or "tensorboard" in \'trainer.callbacks\''),
        ("trainer", "val_check_interval", "'trainer.validate_every_num_batches'"),
        ("trainer.checkpointer", "save_total_limit", "keep_most_recent_by_count"),
        ("distributed", "devices", "'distributed.cuda_devices'"),
    ],
)
def test_keys_of_other_trainers_are_answered_in_every_section(
    section: str, key: str, expected: str
) -> None:
    config = experiment(**AUTO)
    config["distributed"] = {"cuda_devices": [-1, -1]}
    config["trainer"]["checkpointer"] = {"type": "deepspeed"}
    found = config
    for name in filter(None, section.split(".")):
        found = found[name]
    found[key] = 1
    assert any(f"'{key}'" in line and expected in line for line in errors_of(config))
