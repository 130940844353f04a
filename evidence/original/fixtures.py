"""
Makes `tests/fixtures/original`: archives, and an interrupted training, of the environment of 2022.

    python -m evidence.original.fixtures PYTHON

PYTHON is that environment's. Run it in the repository's folder: archives have paths in it.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from evidence.original import jobs

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


def make_archives(python: str) -> None:
    """Of untrained models, whose weights are random."""
    made: List[Dict[str, Any]] = []
    for name in ARCHIVES:
        transformer, archive, *_ = jobs.of_architecture(name, DIRECTORY / name, DATA, False)
        archive["directory"] = str(DIRECTORY / name / "initial")
        outputs = jobs.of_archive(DIRECTORY / name / "initial/model.tar.gz", DIRECTORY / name)
        made += [transformer, archive, *outputs]
    with tempfile.TemporaryDirectory() as scratch:
        jobs.run(python, made, Path(scratch))
    for name in ARCHIVES:
        (DIRECTORY / name / "transformer/pytorch_model.bin").unlink()
        (DIRECTORY / name / "initial/model.tar.gz").rename(DIRECTORY / name / "model.tar.gz")
        (DIRECTORY / name / "expected/outputs.json").rename(DIRECTORY / name / "outputs.json")
        (DIRECTORY / name / "initial").rmdir()
        (DIRECTORY / name / "expected").rmdir()


def interrupt_training(python: str) -> None:
    """After two of three epochs. The weights of the third are those to arrive at."""
    training = {
        "do": "train",
        "directory": str(INTERRUPTED),
        "config": interrupted_training(),
        "keeps_checkpoints": True,
    }
    with tempfile.TemporaryDirectory() as scratch:
        jobs.run(python, [training], Path(scratch))
    (INTERRUPTED / "model_state_e3_b0.th").rename(INTERRUPTED / "expected.th")
    kept = ("config.json", "expected.th", "meta.json", "model_state_e2_b0.th", "vocabulary")
    for path in INTERRUPTED.iterdir():
        if path.name not in (*kept, "training_state_e2_b0.th"):
            path.unlink()
    for path in DIRECTORY.rglob(".lock"):
        path.unlink()


def main() -> None:
    python = sys.argv[1]
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    jobs.write_data(DATA)
    make_archives(python)
    interrupt_training(python)


if __name__ == "__main__":
    main()
