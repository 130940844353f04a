"""The recipes for language models train, and the commands of their page run, on a tiny model."""

import json
import re
import shlex
from pathlib import Path
from typing import List

import pytest
from allennlp.common import Params
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import llm
from demo.prepare_translations import prepare_translations
from tests.end_to_end.causal_lm_test import pretrained
from tests.end_to_end.recipes_test import train
from tests.support.command import REPOSITORY, allennlp

__all__ = ["pretrained"]

SHORT = {"data_loader.batches_per_epoch": 2}


@pytest.fixture(scope="module")
def translations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a sample of the data, in files named as the demo's."""
    directory = tmp_path_factory.mktemp("translations")
    prepare_translations(directory, every=20)
    return directory


def test_recipe_for_conversations_trains(
    pretrained: str, translations: Path, tmp_path: Path
) -> None:
    metrics = train("finetune_chat", translations, tmp_path / "out", SHORT, {"MODEL": pretrained})
    assert metrics["validation_perplexity"] > 1


def run_commands(page: str, model: str, translations: Path, tmp_path: Path) -> List[str]:
    """
    Runs each `allennlp` on the page, in its order, with the tiny model, on the sample, and with its
    outputs elsewhere. Returns the names of the commands.
    """
    text = (REPOSITORY / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    (tmp_path / "output").mkdir()
    for echoed, name in re.findall(r"^echo '(.+)' > output/(.+)$", text, re.MULTILINE):
        (tmp_path / "output" / name).write_text(echoed)
    run = []
    for line in re.findall(r"^allennlp (.+)$", text, re.MULTILINE):
        arguments = [
            re.sub("^output/", f"{tmp_path}/output/", argument).replace(
                "data/translations", str(translations)
            )
            for argument in shlex.split(line)
        ]
        if arguments[0] == "train":
            recipe = Params.from_file(REPOSITORY / arguments[1], ext_vars={"MODEL": model})
            paths = {
                key: str(translations / Path(recipe[key]).name)
                for key in ("train_data_path", "validation_data_path")
            }
            arguments += ["--overrides", json.dumps({**paths, **SHORT})]
        allennlp(
            *arguments, time_limit=120, include_packages=(), environment={"MODEL": model}
        ).check()
        run.append(arguments[0])
    return run


def test_commands_of_the_page_on_language_models_and_the_demos_comparison(
    pretrained: str,
    translations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    run = run_commands("language_models", pretrained, translations, tmp_path)
    assert run == ["train", "evaluate", "predict", "deepspeed"]
    output = tmp_path / "output"
    metrics = json.loads((output / "finetune_llm" / "test_metrics.json").read_text())
    assert metrics["perplexity"] > 1
    assert "\n" not in json.loads((output / "response.jsonl").read_text())["response"]
    assert AutoModelForCausalLM.from_pretrained(output / "exported").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(output / "exported").chat_template

    monkeypatch.setattr(llm, "TEST", translations / "test.jsonl")
    monkeypatch.setattr(llm, "ARCHIVE", output / "finetune_llm" / "model.tar.gz")
    monkeypatch.setattr(llm, "NUM_GENERATED", 10)
    scores = llm.compare()
    before, after = scores["before"], scores["after"]
    # Adapters begin with no effect.
    assert before.perplexity != after.perplexity
    llm.report(scores, ["what was run"])
    printed = capsys.readouterr().out
    for shown in (f"{before.perplexity:.1f}", f"{after.perplexity:.1f}", "what was run"):
        assert shown in printed


def test_commands_of_the_page_on_long_sequences(
    pretrained: str, translations: Path, tmp_path: Path
) -> None:
    assert run_commands("long_sequences", pretrained, translations, tmp_path) == ["train"]
    metrics = json.loads((tmp_path / "output" / "long_sequences" / "metrics.json").read_text())
    assert metrics["validation_perplexity"] > 1
