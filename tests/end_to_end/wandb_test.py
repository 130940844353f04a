"""AllenNLP's "wandb" callback, with the wandb that is installed, which sends nothing here."""

import json
from pathlib import Path

from tests.support.command import allennlp
from tests.support.experiment import INCLUDED, TWO_WORKERS, deepspeed, load_config

ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_API_KEY": "0" * 40}


def test_a_run_is_written_and_continued(tmp_path: Path) -> None:
    callback = {"type": "wandb", "project": "tagging", "summary_interval": 2}
    config, out = tmp_path / "config.json", tmp_path / "out"
    for num_epochs, flags in ((1, []), (2, ["--recover"])):
        changes = {"trainer.callbacks": [callback], "trainer.num_epochs": num_epochs}
        config.write_text(json.dumps(deepspeed(load_config("tagger", TWO_WORKERS, changes), 3)))
        allennlp(
            *("train", config, "-s", out, *flags),
            include_packages=("allennlp_deepspeed", INCLUDED),
            environment=ENVIRONMENT,
            time_limit=120,
        ).check()
        (out / "model.tar.gz").unlink()
    runs = sorted((out / "wandb").glob("offline-run-*"))
    # Two starts of one run, whose ID ends their names.
    assert len(runs) == 2 and len({run.name.rpartition("-")[2] for run in runs}) == 1
    for run in runs:
        assert next(run.glob("run-*.wandb")).stat().st_size > 1_000
