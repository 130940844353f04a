"""`allennlp deepspeed env` and `--version`: what to paste into a bug report."""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from allennlp_deepspeed.commands import DeepSpeed, env
from allennlp_deepspeed.commands.env import environment


def run(*arguments: str) -> None:
    parser = DeepSpeed().add_subparser(argparse.ArgumentParser().add_subparsers())
    parsed = parser.parse_args(arguments)
    parsed.func(parsed)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_of_version:
        run("--version")
    assert exit_of_version.value.code == 0
    assert capsys.readouterr().out == f"allennlp-deepspeed {env.own_version()}\n"


def test_versions_and_the_machine_are_said(capsys: pytest.CaptureFixture) -> None:
    run("env", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["allennlp"] == "2.10.1"
    assert found["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert found["python"]["import hook"] == "on"
    assert found["machine"]["cores"].startswith(str(os.cpu_count()))
    assert len(found["gpus"]) == torch.cuda.device_count()
    run("env")
    text = capsys.readouterr().out
    for heading in found:
        assert heading.replace("_", " ") + ":" in text
    assert found["machine"]["processor"] in text


def test_secrets_and_home_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {
        "NCCL_DEBUG": ("INFO", "INFO"),
        "HF_HOME": (f"{Path.home()}/models", "~/models"),
        "HF_TOKEN": ("hf_abc", "(set, not shown)"),
        "CUDA_API_KEY": ("abc", "(set, not shown)"),
        "HF_ENDPOINT": ("https://me:secret@hub.example/x", "https://(not shown)@hub.example/x"),
        "TOKENIZERS_PARALLELISM": ("true", "true"),
    }
    for name, (value, _) in shown.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATABASE_URL", "of something else")
    found = environment()["variables"]
    assert {name: found[name] for name in shown} == {k: text for k, (_, text) in shown.items()}
    assert "DATABASE_URL" not in found


def test_nothing_needs_to_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(env, "_PACKAGES", ("a-package-that-nobody-has",))
    monkeypatch.chdir(tmp_path)
    found = environment()
    assert found["packages"]["a-package-that-nobody-has"] == "not there"
    assert {found["compilers"][name] for name in ("C++", "CUDA", "ninja")} == {"not there"}
    assert found["cuda"]["driver"] == "not there"
    assert found["operators"]["compiled"] == found["plugin_files"] == []
    run("env")
    assert "plugin files:\n  none" in capsys.readouterr().out


def test_what_fails_has_its_reason_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "device_count", no_driver)
    found = environment()
    assert found["gpus"] == "RuntimeError: the driver is too old"
    assert found["packages"]["deepspeed"]


def test_interrupted_compilations_are_told_from_compiled_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for operator, files in {"cpu_adam": ("lock", "cpu_adam.so"), "async_io": ("lock",)}.items():
        (tmp_path / operator).mkdir()
        for file in files:
            (tmp_path / operator / file).touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = environment()["operators"]
    assert found["compiled"] == ["cpu_adam"]
    assert found["compiling, or interrupted"] == ["async_io"]


def test_plugin_files_that_name_the_package_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".allennlp_plugins").write_text("another_plugin\n")
    assert environment()["plugin_files"][0] == ".allennlp_plugins lacks this package"
    Path(".allennlp_plugins").write_text("another_plugin\nallennlp_deepspeed\n")
    assert environment()["plugin_files"][0] == ".allennlp_plugins names this package"
