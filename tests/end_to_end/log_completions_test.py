"""
The callback that generates after each validation shows what the archive would, and changes nothing.
"""

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
from allennlp.models.archival import load_archive
from allennlp.predictors import Predictor

from allennlp_deepspeed.reports import metrics_file
from tests.end_to_end.causal_lm_test import LORA
from tests.end_to_end.checkpoint_test import assert_ends_alike, recover
from tests.fixtures.tiny_lm import LLAMA
from tests.support.command import REPOSITORY, allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    refusal,
    train,
)
from tests.support.language_model import language_model
from tests.support.tensorboard import events

PREDICTOR_ARGS = {"sample": True, "seed": 3, "max_new_tokens": 7}
CALLBACK: Dict[str, Any] = {
    "type": "log_completions",
    "num_prompts": 2,
    "predictor_args": PREDICTOR_ARGS,
}
INPUTS: List[Dict[str, Any]] = [
    {"prompt": "name1 name2", "response": " noun1"},
    {
        "messages": [
            {"role": "user", "content": "verb3 <b>"},
            {"role": "assistant", "content": "verb4"},
        ]
    },
    {"prompt": "name3", "response": " noun2"},
]


@pytest.fixture(scope="module")
def validation(session_directory: Path) -> str:
    path = session_directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in INPUTS))
    return str(path)


def training(
    tokenizer: str, validation: str, stage: int, *changes: Config, callback: Optional[Config]
) -> Config:
    config = language_model(
        tokenizer,
        {
            # With random states that would show.
            "model.config": {**LLAMA, "attention_dropout": 0.2},
            "validation_data_path": validation,
            "trainer.optimizer": {"type": "adam", "lr": 0.01},
            "trainer.callbacks": ["tensorboard", *([callback] if callback else [])],
        },
        *changes,
    )
    return deepspeed(config, stage)


def logged(result: Result) -> List[List[Dict[str, str]]]:
    path = result.serialization_dir / metrics_file.FILE_NAME
    lines = [line for line in metrics_file.read(str(path)) if line["kind"] == "completions"]
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    return [line["completions"] for line in lines]


def predicted(result: Result) -> List[Dict[str, str]]:
    archive = load_archive(result.archive, cuda_device=-1)
    predictor = Predictor.from_archive(archive, "causal_lm", extra_args=PREDICTOR_ARGS)
    return predictor.predict_batch_json(INPUTS[:2])


CHECKPOINTING = {"trainer.activation_checkpointing": [r"layers\.\d+$"]}
AVERAGE = {"trainer.moving_average": {"type": "exponential", "decay": 0.9}}
CASES: Dict[str, Any] = {
    "one process": (0, ONE_PROCESS),
    "two workers": (2, TWO_WORKERS, {"model.lora": LORA, **CHECKPOINTING}),
    "stage 3": (3, TWO_WORKERS, AVERAGE),
    "stage 3 in one process": (3, ONE_PROCESS, {"model.lora": LORA}),
    "stage 3 with little memory": (3, TWO_WORKERS, {"trainer.reshard_after_micro_batch": True}),
}
SLOW = ("stage 3 in one process", "stage 3 with little memory")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in SLOW)) for name in CASES],
)
def test_completions_are_those_of_the_archive_and_weights_are_as_without(
    experiments: Experiments, tokenizer: str, validation: str, name: str
) -> None:
    stage, *changes = CASES[name]
    result, without = (
        experiments.run(training(tokenizer, validation, stage, *changes, callback=callback))
        for callback in (CALLBACK, None)
    )
    assert_same_weights(result.weights(), without.weights(), tolerance=0)
    assert_same_metrics(result.metrics_of_epochs(), without.metrics_of_epochs(), tolerance=0)
    epochs = logged(result)
    assert len(epochs) == 2 and logged(without) == []
    best = epochs[result.final_metrics()["best_epoch"]]
    prompts = [completion.pop("prompt") for completion in best]
    assert best == predicted(result)
    assert prompts[0] == "name1 name2" and "<user>" in prompts[1]
    assert "verb4" not in prompts[1]


def test_they_are_shown(experiments: Experiments, tokenizer: str, validation: str) -> None:
    config = training(tokenizer, validation, 0, ONE_PROCESS, callback=CALLBACK)
    result = experiments.run(config)
    directory = result.serialization_dir
    log = (directory / "out.log").read_text()
    shown = events(directory / "log" / "validation")
    page = directory / "report.html"
    allennlp("deepspeed", "report", directory, "--output", page).check()
    html = page.read_text()
    for epoch, completions in enumerate(logged(result)):
        for i, completion in enumerate(completions):
            assert completion["response"] in log and completion["response"] in html
            step, text = shown[f"completions/{i}/text_summary"][epoch]
            assert step == epoch + 1
            assert completion["response"] in text.string_val[0].decode()


@pytest.mark.soak
def test_a_recovered_run_ends_alike(
    experiments: Experiments, tokenizer: str, validation: str, tmp_path: Path
) -> None:
    checkpoints = {
        "trainer.checkpointer": {"save_every_num_batches": 4, "keep_most_recent_by_count": None}
    }
    config = training(tokenizer, validation, 3, TWO_WORKERS, checkpoints, callback=CALLBACK)
    result = experiments.run(config)
    for last in ("checkpoint_e0_b8", "checkpoint_e1_b0"):
        recovered = recover(result, tmp_path / last, config, last)
        assert_ends_alike(recovered, result)
        assert logged(recovered) == logged(result)


TEXTS = str(REPOSITORY / "tests/fixtures/data/classification_validation.jsonl")
NO_QUESTION = {"messages": [{"role": "assistant", "content": "noun1"}]}
GPT_2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
REFUSED: Dict[str, Config] = {
    "unknown key": {"trainer.callbacks": [{**CALLBACK, "predictor_args": {"max_tokens": 3}}]},
    "value": {"trainer.callbacks": [{**CALLBACK, "predictor_args": {"temperature": 3.0}}]},
    "no prompt": {"trainer.callbacks": [{**CALLBACK, "num_prompts": 0}]},
    "texts": {"validation_data_path": TEXTS},
    "no question": {"validation_data_path": [NO_QUESTION]},
    "positions": {
        "model.config": {**GPT_2, "vocab_size": LLAMA["vocab_size"]},
        "trainer.callbacks": [{**CALLBACK, "predictor_args": {"max_new_tokens": 60}}],
    },
    "no validation data": {"validation_data_path": None},
    "another trainer": {"trainer.type": "gradient_descent", "trainer.deepspeed_config": None},
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(
    tokenizer: str,
    validation: str,
    tmp_path: Path,
    name: str,
    expect_message: Callable[[str], None],
) -> None:
    config = training(tokenizer, validation, 2, ONE_PROCESS, callback=CALLBACK)
    for key, value in REFUSED[name].items():
        if isinstance(value, list) and key == "validation_data_path":
            (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, value)))
            value = str(tmp_path / "data.jsonl")
        section, _, inner = key.rpartition(".")
        values = config[section] if section else config
        values[inner] = value
        if value is None:
            del values[inner]
    message = refusal(config, tmp_path)
    expect_message(re.sub(r"/\S*/", "/", message))


def test_is_refused_where_workers_share_sequences(
    tokenizer: str, validation: str, tmp_path: Path
) -> None:
    shared = {"trainer.sequence_parallel_size": 2, "model.config": LLAMA}
    config = training(tokenizer, validation, 2, TWO_WORKERS, shared, callback=CALLBACK)
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert "\"log_completions\" can't generate with 'trainer.sequence_parallel_size'" in run.output
