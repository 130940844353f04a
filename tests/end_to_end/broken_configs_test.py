"""
Configs of a small project, as its owner breaks them: what `allennlp deepspeed check` says of each,
and what `--try` finds in those that only a training shows to be wrong.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from tests.fixtures.polarity import write_data
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.command import REPOSITORY, Run, allennlp, subprocess_allennlp

BASE = (Path(__file__).parents[1] / "fixtures" / "polarity.jsonnet").read_text()

PATIENCE = '"patience": 3,'
ENGINE = '"deepspeed_config": "zero_2",'
LOADER = '"data_loader": {"batch_sampler": {"type": "bucket", "batch_size": batch_size, '
SIZE = '"batch_size": batch_size'
TEST = '"evaluate_on_test": true,'
DROPOUT = '"dropout": 0.1,'
INDEXER = (
    '{"type": "pretrained_transformer_mismatched", "model_name": transformer, "max_length": 32}'
)
EMBEDDER = INDEXER.replace("}", ', "train_parameters": true}')
SCHEDULER = (
    '"learning_rate_scheduler": {"type": "slanted_triangular", "num_epochs": epochs, '
    '"num_steps_per_epoch": 20},'
)


def trainer(text: str) -> Tuple[str, str]:
    return PATIENCE, f"{text}, {PATIENCE}"


def engine(text: str) -> Tuple[str, str]:
    return ENGINE, f'"deepspeed_config": {{"type": "zero_2", {text}}},'


def pretrained(file: str) -> Tuple[str, str]:
    embedding = f'{{"embedding_dim": 32, "pretrained_file": "{file}"}}'
    return BASE, BASE.replace(INDEXER, '{"type": "single_id"}').replace(EMBEDDER, embedding)


# What replaces what, in the text of the config.
REFUSED: Dict[str, Tuple[str, str]] = {
    "accumulation twice": (
        ENGINE,
        '"num_gradient_accumulation_steps": 2, "deepspeed_config": '
        '{"type": "zero_2", "gradient_accumulation_steps": 4},',
    ),
    "two precisions": engine('"bf16": {"enabled": true}, "fp16": {"enabled": true}'),
    "bf16 is true": engine('"bf16": true'),
    "batch size beside a sampler": (
        LOADER,
        LOADER.replace('{"batch_sampler', '{"batch_size": 8, "batch_sampler'),
    ),
    "argument of a callback": ('"every": 5', '"each": 5'),
    "former key of the checkpointer": trainer(
        '"checkpointer": {"num_serialized_models_to_keep": 1}'
    ),
    "AllenNLP's checkpointer": trainer('"checkpointer": {"type": "simple"}'),
    "clipping twice": engine('"gradient_clipping": 0.5'),
    "sorting key": ('"sorting_keys": ["text"]', '"sorting_keys": ["tokens"]'),
    "validation data missing": ('"dev.jsonl"', '"deev.jsonl"'),
    "key of DeepSpeed's in trainer": trainer('"zero_optimization": {"stage": 2}'),
    "typo in DeepSpeed's section": engine('"zero_optimization": {"overlap_com": true}'),
    "test set with several workers": (
        TEST,
        f'{TEST} "distributed": {{"cuda_devices": [-1, -1]}},',
    ),
    "batch size with a fraction": (SIZE, '"batch_size": 16.5'),
    "batch size as a string": (SIZE, '"batch_size": "sixteen"'),
    "batch size 0 of the validation": (
        '{"batch_size": 32, "shuffle": false}',
        '{"batch_size": 0, "shuffle": false}',
    ),
    "global batch size without auto": trainer('"global_batch_size": 64'),
    "distributed is a string": (TEST, '"distributed": "true",'),
    "metric without a sign": ('"+macro_f1"', '"macro_f1"'),
    "micro-batch sizes that differ": engine('"train_micro_batch_size_per_gpu": 4'),
    "missing comma": ('"num_epochs": epochs,\n    "pat', '"num_epochs": epochs\n    "pat'),
    "missing variable": ('std.extVar("TRANSFORMER")', 'std.extVar("TRANSFORMERS_PATH")'),
    "number of workers": (TEST, '"distributed": {"num_workers": 2},'),
    "two optimizers": engine('"optimizer": {"type": "Adam", "params": {"lr": 0.001}}'),
    "typo in a preset": (ENGINE, '"deepspeed_config": "zero2",'),
    "two schedulers": engine('"scheduler": {"type": "WarmupLR", "params": {}}'),
    "stage as a string": (ENGINE, '"deepspeed_config": {"zero_optimization": {"stage": "2"}},'),
    "train_batch_size that differs": engine('"train_batch_size": 30'),
    "training data missing": ('"train.jsonl"', '"trian.jsonl"'),
    "transformer missing": ('std.extVar("TRANSFORMER")', '"bert-base-uncasd"'),
    "argument of the model": ('"dropout": 0.1', '"droput": 0.1'),
    "typo in trainer": ('"patience"', '"patiance"'),
    "argument of the reader": ('"tokenizer": {', '"tokeniser": {'),
    "argument of the encoder": ('"bidirectional": true', '"bidirectionnal": true'),
    "argument of the encoder missing": ('"input_size": 32, ', ""),
    "type of an argument": ('"train_parameters": true', '"train_parameters": "yes"'),
    "unknown callback": ('"type": "grad_log"', '"type": "gradlog"'),
    "unknown model": ('"type": "polarity",', '"type": "polarty",'),
    "unknown indexer": (
        '"bert": {"type": "pretrained_transformer_mismatched", "model_name": transformer, '
        '"max_length": 32},\n    },\n  },\n  "train',
        '"bert": {"type": "pretrained_transformers"},\n    },\n  },\n  "train',
    ),
    "unknown optimizer": ('"huggingface_adamw"', '"AdamWW"'),
    "argument of the optimizer": ('"weight_decay": 0.01', '"weigth_decay": 0.01'),
    "argument of the scheduler": ('"num_steps_per_epoch": 20', '"steps_per_epoch": 20'),
    "initializer": ('{"type": "xavier_normal"}', '{"type": "xavier"}'),
    "mode of an initializer": (
        '{"type": "xavier_normal"}',
        '{"type": "kaiming_normal", "mode": "fan_inn"}',
    ),
    "pattern of an initializer": ('"classifier.weight"', '"*classifier.weight"'),
    "string for a list": (DROPOUT, f'{DROPOUT} "class_weights": "balanced",'),
    "betas": ('"lr": lr, ', '"lr": lr, "betas": [0.9], '),
    "parameter group": ('[["bias"], {"weight_decay": 0.0}]', '["bias"], {"weight_decay": 0.0}'),
    "modules with activation checkpointing": trainer('"activation_checkpointing": ["encodr"]'),
    "key of TrainingArguments": trainer('"warmup_ratio": 0.1'),
    "key of TrainingArguments with one here": trainer('"logging_steps": 10'),
    "num_epochs as a string": ('"num_epochs": epochs,\n    "pat', '"num_epochs": "ten",\n    "pat'),
    "frozen parameters that there aren't": trainer('"no_grad": ["classifier", "text_embeder"]'),
    "all parameters frozen": trainer('"no_grad": [".*"]'),
    "rate of null": ('"lr": lr, ', '"lr": null, '),
    "typo at the top level": ('"validation_data_loader"', '"validation_dataloader"'),
    "key of AllenNLP 1 at the top level": (TEST, '"iterator": {"type": "basic"},'),
    "file of an embedding": pretrained("(glove.zip)#glove.txt"),
    "devices in the trainer": trainer('"cuda_devices": [0, 1]'),
    "size of the encoder": ('"input_size": 32', '"input_size": 768'),
    "size of the feed-forward network": (
        DROPOUT,
        f'{DROPOUT} "feedforward": {{"input_dim": 32, "num_layers": 1, "hidden_dims": 8, '
        '"activations": "relu"},',
    ),
    "activation": (
        DROPOUT,
        f'{DROPOUT} "feedforward": {{"input_dim": 64, "num_layers": 1, "hidden_dims": 8, '
        '"activations": "rellu"},',
    ),
    "number in quotes": (DROPOUT, '"dropout": "0.1",'),
    "rate in quotes": ('{"weight_decay": 0.0}', '{"lr": "1e-5"}'),
    "null in quotes": (PATIENCE, '"patience": "null",'),
    "None of Python": (PATIENCE, '"patience": None,'),
    "callback of Lightning": ('{"type": "grad_log", "every": 5}', '"EarlyStopping"'),
    "bf16 within zero_optimization": engine('"zero_optimization": {"bf16": {"enabled": true}}'),
    "key of Lightning in DeepSpeed's section": engine('"accumulate_grad_batches": 4'),
    "scheduler of Hugging Face": (SCHEDULER, '"learning_rate_scheduler": "cosine",'),
    "choice of the scheduler": (
        SCHEDULER,
        '"learning_rate_scheduler": {"type": "reduce_on_plateau", "mode": "maximum"},',
    ),
    "a misspelt section": ('"trainer": {', '"trainner": {'),
    "device as a string": trainer('"cuda_device": "0"'),
    "one worker": (TEST, '"distributed": {"cuda_devices": [-1]},'),
    "unknown train loop": (TEST, f'{TEST} "type": "trainer",'),
    "data set of the vocabulary": (TEST, '"datasets_for_vocab_creation": ["dev"],'),
}

# Only a training shows that they are wrong.
FOUND_BY_TRYING: Dict[str, Tuple[str, str]] = {
    "unknown metric": ('"+macro_f1"', '"+f1"'),
    "learning rate": ("local lr = 1e-3", "local lr = 1e30"),
}

# Valid, and rarely meant.
WARNED: Dict[str, Tuple[str, str]] = {
    "sign": ('"+macro_f1"', '"+loss"'),
    "prefix of a metric": ('"+macro_f1"', '"+validation_macro_f1"'),
    "unknown metric": ('"+macro_f1"', '"+f1"'),
    "no validation data": ('"validation_data_path": data + "dev.jsonl",', ""),
    "the same data": ('"dev.jsonl"', '"train.jsonl"'),
    "namespaces": (TEST, f'{TEST} "vocabulary": {{"non_padded_namespaces": []}},'),
    "length of the indexer": ('"max_length": 32},', '"max_length": 16},'),
    "batches that are never full": (
        LOADER,
        LOADER.replace('{"batch_sampler', '{"max_instances_in_memory": 10, "batch_sampler'),
    ),
    "epochs of the schedule": ('"num_epochs": epochs, "num', '"num_epochs": 9, "num'),
    "rate of Adam": ("local lr = 1e-3", "local lr = 1e3"),
    "pattern of an initializer": ('"classifier.weight"', '"clasifier.weight"'),
    "key of a parameter group": ('{"weight_decay": 0.0}', '{"weight_dekay": 0.0}'),
    "wordpieces of words": (
        '"tokenizer": {"type": "whitespace"}',
        '"tokenizer": {"type": "pretrained_transformer", "model_name": transformer}',
    ),
}

VALID: Dict[str, Tuple[str, str]] = {
    "as it is": ("", ""),
    "an import that isn't used": ("local lr", 'local x = import "nope.jsonnet";\nlocal lr'),
    "file of an embedding": pretrained("(data/train.jsonl)#glove.txt"),
    "address of an embedding": pretrained("https://example.com/glove.txt"),
    "a GPU that this machine lacks": trainer('"cuda_device": 0'),
    "a batch of more instances than are read": (SIZE, '"batch_size": 90, "drop_last": true'),
}

OVERRIDES = {
    "a missing comma": '{"trainer.num_epochs": 2 "trainer.patience": 1}',
    "a typo": '{"trainer.patiance": 1}',
    "the whole section": '{"trainer": {"num_epochs": 1}}',
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("project")
    write_data(directory / "data")
    tiny_bert(directory / "bert")
    return directory


Check = Callable[..., Run]


@pytest.fixture
def check(project: Path, tmp_path: Path) -> Check:
    def run(change: Tuple[str, str], *arguments: str, package: str = "tests.fixtures") -> Run:
        old, new = change
        assert old in BASE
        (tmp_path / "config.jsonnet").write_text(BASE.replace(old, new, 1))
        link = project / f"{tmp_path.name}.jsonnet"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "config.jsonnet")
        return allennlp(
            "deepspeed",
            "check",
            f"{tmp_path.name}.jsonnet",
            *arguments,
            include_packages=("allennlp_deepspeed", package),
            environment={"TRANSFORMER": "bert", "TMPDIR": str(tmp_path)},
            enter=functools.partial(os.chdir, project),
        )

    return run


def last_lines(run: Run, project: Path, tmp_path: Path) -> str:
    """Without paths of this test, and what libraries print before."""
    lines = [line for line in run.lines() if "Warning" not in line and line.strip()]
    text = "\n".join(lines).replace(f"{tmp_path.name}.jsonnet", "config.jsonnet")
    return text.replace(str(project), "PROJECT")


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_config_is_refused_in_a_line(
    name: str, check: Check, project: Path, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    run = check(REFUSED[name])
    assert run.returncode == 1, run.output
    assert "Traceback" not in run.output
    expect_message(last_lines(run, project, tmp_path))


@pytest.mark.parametrize("name", OVERRIDES)
def test_broken_overrides_are_told_with_their_place(
    name: str, check: Check, project: Path, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    run = check(("", ""), "-o", OVERRIDES[name])
    assert run.returncode == 1, run.output
    expect_message(last_lines(run, project, tmp_path))


@pytest.mark.parametrize("name", VALID)
def test_a_config_that_trains_is_valid(name: str, check: Check) -> None:
    run = check(VALID[name])
    assert run.returncode == 0, run.output


@pytest.mark.parametrize("name", WARNED)
def test_a_valid_config_that_is_rarely_meant_has_a_warning(
    name: str, check: Check, expect_message: Callable[[str], None]
) -> None:
    lines = check(WARNED[name]).check().output.splitlines()
    warnings = [line for line in lines if line.startswith("Warning: ")]
    assert warnings
    expect_message("\n".join(warnings))


def test_a_learning_rate_that_no_key_sets_is_shown(check: Check) -> None:
    shown = check(('"lr": lr, ', "")).check().output
    assert re.search(r"^trainer\.optimizer\.lr = [\d.e-]+ ", shown, re.MULTILINE)
    assert "trainer.optimizer.lr = " not in check(("", "")).check().output


def test_a_section_that_replaces_that_of_an_import_is_named(
    check: Check, project: Path, expect_message: Callable[[str], None]
) -> None:
    (project / "base.jsonnet").write_text(BASE)
    for trainer in ('"trainer": {"num_epochs": 2}', '"trainer"+: {"optimizer": {"lr": 1e-5}}'):
        run = check((BASE, f'(import "{project}/base.jsonnet") + {{{trainer}}}'))
        assert (run.returncode == 0) == ("+:" in trainer), run.output
        lines = [line for line in run.output.splitlines() if "base.jsonnet" in line]
        expect_message("\n".join(lines).replace(str(project), "PROJECT"))


def test_a_package_that_there_is_not_is_named(project: Path) -> None:
    included = ["--include-package", "tests.fixture"]
    run = subprocess_allennlp("deepspeed", "check", "base.jsonnet", *included, cwd=project)
    assert run.returncode == 1
    assert "Traceback" not in run.output
    assert "--include-package tests.fixture:" in run.output


def test_the_loss_of_one_batch_is_shown_step_by_step(check: Check) -> None:
    run = check(("local lr = 1e-3", "local lr = 1e-2"), "--overfit", "--steps", "30")
    losses = [float(loss) for loss in re.findall(r"\d+: ([\d.e-]+)", run.check().output)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", FOUND_BY_TRYING)
def test_trying_shows_what_only_a_training_does(
    name: str, check: Check, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    run = check(FOUND_BY_TRYING[name], "--try")
    assert run.returncode == 1, run.output
    assert "Traceback" not in run.output
    lines = [line for line in run.output.splitlines() if "trial failed" in line]
    # What has ended is said before.
    assert "  first training step" in run.output.partition(lines[0])[0]
    text = "\n".join(lines).replace(str(REPOSITORY), "REPOSITORY")
    expect_message(re.sub(r"line \d+", "line N", text))
    assert os.listdir(tmp_path) == ["config.jsonnet"]


@pytest.mark.parametrize("workers", ["", '"distributed": {"cuda_devices": [-1, -1]},'])
@pytest.mark.parametrize("reader", ["polarity_indexed_early", "polarity_without_processes"])
def test_trying_shows_what_a_process_of_the_data_loader_raises(
    reader: str, workers: str, check: Check, expect_message: Callable[[str], None]
) -> None:
    config = BASE.replace("polarity_jsonl", reader).replace(
        LOADER, LOADER.replace('{"batch', '{"num_workers": 1, "batch')
    )
    run = check((BASE, config.replace(TEST, workers)), "--try")
    assert run.returncode == 1, run.output
    assert "Traceback" not in run.output
    text = "\n".join(line for line in run.output.splitlines() if "trial failed" in line)
    expect_message(re.sub(r"line \d+", "line N", text.replace(str(REPOSITORY), "REPOSITORY")))


WORKERS = (
    TEST,
    f'{TEST} "type": "deepspeed", "distributed": {{"cuda_devices": [-1, -1]}},',
)


NODES = (
    TEST,
    f'{TEST} "type": "deepspeed", "distributed": {{"cuda_devices": [-1, -1], "num_nodes": 2, '
    '"primary_address": "192.0.2.1", "primary_port": 29400},',
)


@pytest.mark.parametrize(
    "change",
    [("", ""), WORKERS, NODES, ('"polarity_jsonl"', '"polarity_without_limit"')],
    ids=["one process", "workers", "nodes", "a reader without max_instances"],
)
def test_trying_a_sound_config_trains_and_leaves_nothing(
    change: Tuple[str, str], check: Check, project: Path, tmp_path: Path
) -> None:
    before = sorted(os.listdir(project))
    run = check(change, "--try").check()
    stages = [line.strip() for line in run.output.splitlines() if line.startswith("  ")]
    num_steps = 6 if "without_limit" in change[1] else 2
    for stage in (
        f"{num_steps} training steps",
        "validation",
        "checkpoint",
        "resumption",
        "peak memory",
    ):
        assert any(line.startswith(stage) for line in stages), (stage, run.output)
    assert "validation_macro_f1" in run.output
    assert "of CPU memory are free" not in run.output
    assert not run.processes
    assert os.listdir(tmp_path) == ["config.jsonnet"]
    after = [name for name in os.listdir(project) if not name.endswith(".jsonnet")]
    assert sorted(after) == [name for name in before if not name.endswith(".jsonnet")]


def test_too_little_memory_is_told_before_the_trial(check: Check) -> None:
    run = check(WORKERS, "--try", package="tests.end_to_end.little_memory").check()
    before = run.output.partition("data, model and engine")[0]
    assert "model states for 2 workers, and 0 bytes of CPU memory are free" in before


def test_a_malformed_datum_is_told_with_its_file_and_line(
    check: Check, project: Path, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    lines: List[Any] = (project / "data" / "train.jsonl").read_text().splitlines()
    lines[6] = lines[6][:-1]
    (project / "data" / "broken.jsonl").write_text("\n".join(lines))
    run = check(('"train.jsonl"', '"broken.jsonl"'))
    assert run.returncode == 1, run.output
    expect_message(last_lines(run, project, tmp_path))
