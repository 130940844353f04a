"""AllenNLP's "wandb" callback, with the wandb that is installed, which sends nothing here."""

from pathlib import Path

from tests.support.experiment import TWO_WORKERS, deepspeed, load_config, train

ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_API_KEY": "0" * 40}


def test_a_run_is_written_and_continued(tmp_path: Path) -> None:
    callback = {"type": "wandb", "project": "tagging", "summary_interval": 2}
    out = tmp_path / "out"
    for num_epochs, flags in ((1, []), (2, ["--recover"])):
        changes = {"trainer.callbacks": [callback], "trainer.num_epochs": num_epochs}
        config = deepspeed(load_config("tagger", TWO_WORKERS, changes), 3)
        train(config, tmp_path, *flags, environment=ENVIRONMENT, time_limit=120).check()
        (out / "model.tar.gz").unlink()
    runs = sorted((out / "wandb").glob("offline-run-*"))
    # Two starts of one run, whose ID ends their names.
    assert len(runs) == 2 and len({run.name.rpartition("-")[2] for run in runs}) == 1
    for run in runs:
        assert next(run.glob("run-*.wandb")).stat().st_size > 1_000
