"""
Makes `tests/fixtures/original`: archives, and an interrupted training, of the environment of 2022.

    python -m tests.original.fixtures PYTHON

PYTHON is that environment's. Run it in the repository's folder: archives have paths in it.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict

from tests.original import jobs

DIRECTORY = Path("tests/fixtures/original")
DATA = DIRECTORY / "data.jsonl"
ARCHIVES = ("gpt2", "gpt_neo", "longformer", "m2m_100-encoder", "roberta", "xlm")
INTERRUPTED = DIRECTORY / "interrupted"


def interrupted_training() -> Dict[str, Any]:
    """RoBERTa, whose parameters had another order, with Adam and a state with NumPy's scalars."""
    config = jobs.classifier(DIRECTORY / "roberta/transformer", DATA, "roberta", load_weights=False)
    config["trainer"] = {
        **config["trainer"],
        "num_epochs": 3,
        "optimizer": {"type": "adam", "lr": 0.002},
        "learning_rate_scheduler": {"type": "cosine", "t_initial": 3},
        "checkpointer": {"keep_most_recent_by_count": 4},
    }
    return jobs.from_archive(config, DIRECTORY / "roberta/model.tar.gz")


def main() -> None:
    python = sys.argv[1]
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    jobs.write_data(DATA)
    with tempfile.TemporaryDirectory() as scratch:
        made = [
            job
            for name in ARCHIVES
            for job in jobs.of_architecture(name, DIRECTORY, DATA, load_weights=False)
        ]
        jobs.run(python, made, Path(scratch))
        for name in ARCHIVES:
            folder = DIRECTORY / name
            shutil.move(folder / "trained/model.tar.gz", folder)
            shutil.move(folder / "expected/outputs.json", folder)
            for part in ("initial", "trained", "expected"):
                shutil.rmtree(folder / part)
            (folder / "transformer/pytorch_model.bin").unlink()
        training = {
            "do": "train",
            "directory": str(INTERRUPTED),
            "config": interrupted_training(),
            "keeps_checkpoints": True,
        }
        jobs.run(python, [training], Path(scratch))
    # Interrupted after two of three epochs; the weights of the third are those to arrive at.
    (INTERRUPTED / "model_state_e3_b0.th").rename(INTERRUPTED / "expected.th")
    kept = ("config.json", "expected.th", "meta.json", "model_state_e2_b0.th", "vocabulary")
    for path in INTERRUPTED.iterdir():
        if path.name not in (*kept, "training_state_e2_b0.th"):
            path.unlink()
    for path in DIRECTORY.rglob(".lock"):
        path.unlink()


if __name__ == "__main__":
    main()
