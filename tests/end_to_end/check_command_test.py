"""`allennlp deepspeed check`, and what it must leave to classes of the user's."""

import functools
import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.support.command import Run, allennlp
from tests.support.experiment import ONE_PROCESS, TWO_WORKERS, load_config

NAMES = ("allennlp_deepspeed", "tests.fixtures")

# Of a user, in the directory where the command is started.
PACKAGE = """
from pathlib import Path
from typing import List, Optional

from allennlp.commands.train import TrainModel
from allennlp.common import FromParams
from allennlp.data import DatasetReader, Vocabulary
from allennlp.models import BasicClassifier, Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.trainer import Trainer

from allennlp_deepspeed import DeepSpeedTrainer, DeepSpeedTrainModel
from tests.fixtures.polarity import PolarityReader


@DatasetReader.register("polarity_with_notes")
class ReaderWithNotes(PolarityReader):
    def __init__(self, serialization_dir: str, **kwargs) -> None:
        super().__init__(**kwargs)
        assert "reader" in (Path(serialization_dir) / "config.json").read_text()


@TrainerCallback.register("notes")
class Notes(TrainerCallback):
    def __init__(
        self, serialization_dir: str, path: Path, others: Optional[List[Path]] = None
    ) -> None:
        super().__init__(serialization_dir)
        self.path = Path(path)

    def on_end(self, trainer, metrics=None, epoch=None, is_primary=True, **kwargs) -> None:
        self.path.write_text("written")


@TrainerCallback.register("reader_of_the_directory")
class ReaderOfTheDirectory(TrainerCallback):
    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        directory = Path(serialization_dir)
        assert "trainer" in (directory / "config.json").read_text()
        assert Vocabulary.from_files(directory / "vocabulary").get_vocab_size("labels") == 3
        (directory / "plots").mkdir()
        (directory / "plots" / "labels.txt").write_text("")


@Model.register("classifier_of_a_label")
class ClassifierOfLabel(BasicClassifier):
    def __init__(self, vocab, label: str, **kwargs) -> None:
        super().__init__(vocab, **kwargs)
        self.label = vocab.get_token_index(label, "labels")


@Trainer.register("deepspeed_of_a_user", constructor="from_partial_objects")
class TrainerOfUser(DeepSpeedTrainer):
    pass


@TrainModel.register("deepspeed_loop_of_a_user", constructor="from_partial_objects")
class DeepSpeedLoop(DeepSpeedTrainModel):
    pass


class Stepper(FromParams):
    def __init__(self, resume: str, num_rounds: int) -> None:
        self.text = resume * num_rounds


@TrainModel.register("loop_of_a_user")
class Loop(TrainModel):
    def __init__(self, serialization_dir: str, trainer: Stepper, notes: Path) -> None:
        self.trainer, self.notes = trainer, Path(notes)
        self.directory = Path(serialization_dir)

    def run(self):
        self.notes.write_text(self.trainer.text)
        # What AllenNLP archives.
        (self.directory / "best.th").touch()
        (self.directory / "vocabulary").mkdir(exist_ok=True)

    def finish(self, metrics) -> None:
        pass

    @property
    def model(self):
        return None
"""


def run(directory: Path, *arguments: Any, packages: Any = NAMES) -> Run:
    (directory / "of_a_user.py").write_text(PACKAGE)
    return allennlp(
        *arguments, include_packages=packages, enter=functools.partial(os.chdir, directory)
    )


def check(directory: Path, config: Any, *arguments: Any, packages: Any = NAMES) -> Run:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.jsonnet").write_text(text)
    return run(directory, "deepspeed", "check", "config.jsonnet", *arguments, packages=packages)


def classifier(*overrides: Dict[str, Any]) -> Dict[str, Any]:
    return load_config("classifier", {"trainer.type": "deepspeed"}, *overrides)


def assert_refused(run: Run, lines: List[str]) -> None:
    """With these lines at the end, in any order."""
    assert run.returncode == 1, run.output
    assert "Traceback" not in run.output
    said = run.output.splitlines()[-len(lines) :]
    for line in lines:
        assert any(each.startswith(line) for each in said), (line, run.output)


def test_a_reader_is_told_the_directory(tmp_path: Path) -> None:
    config = classifier(ONE_PROCESS, {"dataset_reader.type": "polarity_with_notes"})
    check(tmp_path, config, packages=[*NAMES, "of_a_user"]).check()


def test_every_callback_is_constructed_as_in_a_training(tmp_path: Path) -> None:
    callbacks = [
        *("console_logger", "confidence_checks", "tensorboard", "track_epoch_callback", "wandb"),
        {"type": "should_validate_callback", "validation_interval": 2},
        "reader_of_the_directory",
    ]
    config = classifier(ONE_PROCESS, {"trainer.callbacks": callbacks})
    check(tmp_path, config, packages=[*NAMES, "of_a_user"]).check()


def test_a_checkpointer_without_a_type_is_that_of_this_package(tmp_path: Path) -> None:
    config = classifier(ONE_PROCESS, {"trainer.checkpointer": {"exclude_frozen_parameters": True}})
    check(tmp_path, config).check()


def test_a_sound_config_is_printed_with_where_its_values_are_from(tmp_path: Path) -> None:
    changes = {
        "trainer.num_gradient_accumulation_steps": 2,
        "trainer.grad_norm": 0.5,
        "trainer.deepspeed_config": {
            "type": "zero_2",
            "zero_optimization": {
                "reduce_bucket_size": 9000,
                "allgather_bucket_size": "auto",
                "offload_optimizer": {"device": "cpu"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 50, "warmup_num_steps": 5},
            },
        },
    }
    config = classifier(TWO_WORKERS, changes)
    shown = check(tmp_path, config).check().output
    assert "config.jsonnet is valid. Resolved DeepSpeed configuration:" in shown
    _, _, text = shown.partition("configuration:\n")
    resolved, end = json.JSONDecoder().raw_decode(text)
    # A batch of 6 instances for each of 2 workers, twice.
    assert (resolved["gradient_accumulation_steps"], resolved["train_batch_size"]) == (2, 24)
    assert resolved["gradient_clipping"] == 0.5
    assert resolved["scheduler"]["params"]["total_num_steps"] == 50
    zero = resolved["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (2, 9000)
    assert "allgather_bucket_size" not in zero
    lines = text[end:].splitlines()
    assert "trainer.deepspeed_config.gradient_clipping = 0.5 (from trainer.grad_norm)" in lines
    assert (
        "trainer.deepspeed_config.zero_optimization.allgather_bucket_size: DeepSpeed's default"
        in lines
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.jsonnet", "of_a_user.py"]


def test_all_findings_are_said_in_one_message(tmp_path: Path) -> None:
    config = classifier(
        TWO_WORKERS,
        {
            "trainer.num_epoch": 3,
            "trainer.deepspeed_config": {"zero_optimization": {"stage": 2, "bucket_size": 5}},
        },
    )
    lines = [
        "unknown key 'num_epoch' in 'trainer': did you mean \"num_epochs\"?",
        "'trainer.deepspeed_config.zero_optimization.bucket_size' is unknown: did you mean",
    ]
    assert_refused(check(tmp_path, config), lines)


def test_parameters_that_only_some_workers_use_are_refused_at_stage_3(tmp_path: Path) -> None:
    accelerator = {"type": "torch", "find_unused_parameters": True}
    distributed = {**TWO_WORKERS["distributed"], "ddp_accelerator": accelerator}
    config = classifier({"distributed": distributed, "trainer.deepspeed_config": "zero_3"})
    refused = check(tmp_path, config)
    assert_refused(refused, ["'distributed.ddp_accelerator.find_unused_parameters' is true"])
    check(tmp_path, config, "-o", '{"trainer.deepspeed_config": "zero_2"}').check()


@pytest.mark.parametrize("path", ["offload_param", "offload_optimizer"])
def test_what_nvme_needs_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    # Without a compiler nothing is found, libaio neither.
    monkeypatch.setenv("CC", "false")
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, path: {"device": "nvme"}}
    config = classifier(ONE_PROCESS, {"trainer.deepspeed_config": {"zero_optimization": section}})
    line = f"'trainer.deepspeed_config.zero_optimization.{path}.device' is \"nvme\""
    assert f"Not for this machine: {line}" in check(tmp_path, config).check().output
    assert_refused(run(tmp_path, "train", "config.jsonnet", "-s", "out"), [line])


def test_optimizer_states_that_stay_in_memory_need_no_nvme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    section = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    config = classifier(ONE_PROCESS, {"trainer.deepspeed_config": {"zero_optimization": section}})
    assert "Not for this machine" not in check(tmp_path, config).check().output


def test_overrides_are_checked_with_the_file(tmp_path: Path) -> None:
    config = classifier(ONE_PROCESS, {"trainer.use_amp": "no"})
    assert_refused(check(tmp_path, config), ["'trainer.use_amp' is \"no\""])
    check(tmp_path, config, "-o", '{"trainer.use_amp": false}').check()
    sound = classifier(ONE_PROCESS)
    unreadable = check(tmp_path, sound, "--overrides", '{"trainer.optimizer.lr": }')
    assert_refused(unreadable, ["The overrides (-o) could not be read after "])
    of_nothing = check(tmp_path, sound, "-o", '{"trainer.moving_average.decay": 0.9}')
    assert_refused(of_nothing, ["The overrides (-o) have 'trainer.moving_average.decay'"])
    assert """-o '{"trainer.moving_average": {"decay": ...}}'""" in of_nothing.output


@pytest.mark.parametrize(
    "name, line",
    [
        ("nowhere.jsonnet", "nowhere.jsonnet"),
        ("config.jsonnet", "config.jsonnet could not be read: "),
    ],
)
def test_what_is_no_config_is_told_in_a_line(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "config.jsonnet").write_text("{'trainer': {'type': 'deepspeed'}")
    refused = run(tmp_path, "deepspeed", "check", name)
    assert refused.returncode == 1
    assert "Traceback" not in refused.output
    assert line in refused.output, refused.output


def test_classes_of_the_users_are_taken_and_train(tmp_path: Path) -> None:
    packages = (*NAMES, "of_a_user")
    notes = {"type": "notes", "path": "notes.txt", "others": ["a.txt", "nowhere/b.txt"]}
    changes = {
        "type": "deepspeed_loop_of_a_user",
        "trainer.type": "deepspeed_of_a_user",
        "trainer.callbacks": [notes],
        "trainer.num_epochs": 1,
    }
    check(tmp_path, classifier(ONE_PROCESS, changes), packages=packages).check()
    run(tmp_path, "train", "config.jsonnet", "-s", "out", packages=packages).check()
    assert (tmp_path / "out" / "model.tar.gz").exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_train_loop_of_the_users_has_the_trainer_that_it_likes(tmp_path: Path) -> None:
    # "resume" is a key of the "deepspeed" trainer, too.
    config = {
        "type": "loop_of_a_user",
        "trainer": {"resume": "once more ", "num_rounds": 2},
        "notes": "notes.txt",
    }
    packages = (*NAMES, "of_a_user")
    refused = check(tmp_path, config, packages=packages)
    assert_refused(refused, ["'trainer.type' isn't \"deepspeed\""])
    assert """-o '{"trainer.type": "deepspeed"}'""" in refused.output
    run(tmp_path, "train", "config.jsonnet", "-s", "out", packages=packages).check()
    assert (tmp_path / "notes.txt").read_text() == "once more once more "


def test_what_the_first_step_finds_is_auto(tmp_path: Path) -> None:
    trainer = {
        "trainer.num_gradient_accumulation_steps": "auto",
        "trainer.global_batch_size": 24,
        "trainer.callbacks": [],
    }
    shown = check(tmp_path, classifier(TWO_WORKERS, trainer, {"data_loader": {}})).check().output
    resolved, _ = json.JSONDecoder().raw_decode(shown.partition("configuration:\n")[2])
    for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        assert resolved[key] == "auto"
    assert resolved["train_batch_size"] == 24


def test_patterns_without_a_parameter_are_told_by_each_command(tmp_path: Path) -> None:
    weight = "_classification_layer.weight"
    changes = {
        "trainer.optimizer": {
            "type": "sgd",
            "lr": 0.1,
            "parameter_groups": [[[weight], {"lr": 0.2}], [["embeder", "bias"], {}]],
        },
        "model.initializer": {"regexes": [[weight, "normal"], ["no_layer", "normal"]]},
        "trainer.num_epochs": 1,
    }
    checked = check(tmp_path, classifier(ONE_PROCESS, changes)).check().output
    trained = run(tmp_path, "train", "config.jsonnet", "-s", "out").check().output
    for path, pattern in (
        ("trainer.optimizer.parameter_groups.1.0.0", "embeder"),
        ("model.initializer.regexes.1.0", "no_layer"),
    ):
        (line,) = [line for line in checked.splitlines() if f"'{path}' is \"{pattern}\"" in line]
        assert line.removeprefix("Warning: ").rstrip(".") in trained
    assert "regexes.0.0" not in checked + trained

    config = classifier(ONE_PROCESS, changes, {"trainer.no_grad": ["bias", "embeder"]})
    refused = check(tmp_path, config)
    assert_refused(refused, ["'trainer.no_grad.1' is \"embeder\""])
    said = run(tmp_path, "train", "config.jsonnet", "-s", "refused").output
    assert refused.output.splitlines()[-1] in said.splitlines()


def test_labels_that_come_late_in_the_chosen_data_are_accepted(tmp_path: Path) -> None:
    """The command reads the first instances only."""
    labels = ["no", *["yes"] * 99, "maybe"]
    lines = [json.dumps({"text": "a good film", "label": label}) for label in labels]
    for name, chosen in (("train", lines), ("validation", lines[-1:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(chosen))
    config = classifier(
        {
            "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
            "train_data_path": str(tmp_path / "train.jsonl"),
            "validation_data_path": str(tmp_path / "validation.jsonl"),
            "datasets_for_vocab_creation": ["train"],
        }
    )
    assert check(tmp_path, config).returncode == 0
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:9]))
    assert "maybe" in check(tmp_path, config).output


@pytest.mark.parametrize("arguments", [[], ["--try"]], ids=["check", "try"])
def test_a_model_may_ask_for_a_label_that_comes_late(arguments: List[str], tmp_path: Path) -> None:
    labels = [*["no"] * 80, *["yes"] * 20]
    lines = [json.dumps({"text": "a good film", "label": label}) for label in labels]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    config = classifier(
        ONE_PROCESS,
        {
            "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
            "train_data_path": str(tmp_path / "train.jsonl"),
            "validation_data_path": str(tmp_path / "train.jsonl"),
            "trainer.callbacks": [],
            "model.type": "classifier_of_a_label",
            "model.label": "yes",
        },
    )
    packages = (*NAMES, "of_a_user")
    check(tmp_path, config, *arguments, packages=packages).check()
    config["model"]["label"] = "perhaps"
    refused = check(tmp_path, config, *arguments, packages=packages)
    assert refused.returncode == 1 and "perhaps" in refused.output
