"""`allennlp deepspeed env` and `--version`: what to paste into a bug report."""

import argparse
from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

from allennlp_deepspeed.commands import DeepSpeed, env
from allennlp_deepspeed.commands.env import report


def run(*arguments: str) -> None:
    parser = DeepSpeed().add_subparser(argparse.ArgumentParser().add_subparsers())
    parsed = parser.parse_args(arguments)
    parsed.func(parsed)


@pytest.fixture
def without_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither PyTorch nor DeepSpeed asks the machine, which takes seconds."""
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: "PyTorch version: 2")
    monkeypatch.setattr(env.env_report, "main", lambda: print("\x1b[92m[OKAY]\x1b[0m"))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_of_version:
        run("--version")
    assert exit_of_version.value.code == 0
    assert capsys.readouterr().out == f"allennlp-deepspeed {env.own_version()}\n"


def test_versions_and_the_machine_are_said(capsys: pytest.CaptureFixture) -> None:
    run("env")
    text = capsys.readouterr().out
    for line in (
        f"version: {env.own_version()}",
        "import hook: on",
        "allennlp: 2.10.1",
        f"PyTorch version: {torch.__version__}",
        "DeepSpeed C++/CUDA extension op report",
    ):
        assert f"\n{line}\n" in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("without_commands")
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
    text = report()
    for name, (_, value) in shown.items():
        assert f"\n{name}={value}\n" in text
    assert "DATABASE_URL" not in text and str(Path.home()) not in text


@pytest.mark.usefixtures("without_commands")
def test_plugin_files_that_name_the_package_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".allennlp_plugins").write_text("another_plugin\n")
    assert "plugin file: .allennlp_plugins lacks this package" in report()
    Path(".allennlp_plugins").write_text("another_plugin\nallennlp_deepspeed\n")
    assert "plugin file: .allennlp_plugins names this package" in report()
