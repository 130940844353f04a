"""
The demo, started by `make demo`: prepares the verses, trains the classifier in
`training_configs/verse_classifier.jsonnet` with DeepSpeed on two CPU workers, and evaluates and
predicts with the archive that training leaves. Run it from the repository's root.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Dict, List

CONFIG = Path("training_configs/verse_classifier.jsonnet")
DATA = Path("data/verses")
OUTPUT = Path("output/verse_classifier")

ARCHIVE = OUTPUT / "model.tar.gz"
TEST_METRICS = OUTPUT / "test_metrics.json"
SAMPLE = OUTPUT / "sample.jsonl"
PREDICTIONS = OUTPUT / "predictions.jsonl"

SAMPLE_SIZE = 8


def run(*command) -> str:
    """Prints `command` and runs it. Returns a line for the report: the seconds it took, and it."""
    line = " ".join(str(part) for part in command)
    print(f"\n$ {line}", flush=True)
    start = time.monotonic()
    subprocess.run([str(part) for part in command], check=True)
    return f"{time.monotonic() - start:5.0f} s   {line}"


def allennlp(*arguments) -> str:
    return run(
        "allennlp", *arguments, "--include-package", "allennlp_deepspeed", "--file-friendly-logging"
    )


def read_json_lines(path: Path) -> List[Dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def write_sample() -> None:
    """A few verses from all over the test set, for `allennlp predict`."""
    lines = (DATA / "test.jsonl").read_text().splitlines(keepends=True)
    SAMPLE.write_text("".join(lines[:: len(lines) // SAMPLE_SIZE][:SAMPLE_SIZE]))


def majority_class_accuracy() -> float:
    """The test accuracy of always answering the label that is most frequent in training."""
    train_labels = [verse["label"] for verse in read_json_lines(DATA / "train.jsonl")]
    test_labels = [verse["label"] for verse in read_json_lines(DATA / "test.jsonl")]
    majority = max(set(train_labels), key=train_labels.count)
    return test_labels.count(majority) / len(test_labels)


def report(steps: List[str]) -> None:
    accuracy = json.loads(TEST_METRICS.read_text())["accuracy"]
    print("\nWhat was run:")
    for step in steps:
        print(f"  {step}")
    print(f"\nTest accuracy:           {accuracy:.1%}")
    print(f"Majority-class accuracy: {majority_class_accuracy():.1%}")
    print("\nA few predictions on test verses:")
    for verse, prediction in zip(read_json_lines(SAMPLE), read_json_lines(PREDICTIONS)):
        is_right = "right" if prediction["label"] == verse["label"] else "wrong"
        print(
            f"  {verse['reference']:<22} is from {verse['label']:<15} "
            f"predicted {prediction['label']:<15} {is_right}   {verse['sentence'][:50]} ..."
        )
    print("\nFiles:")
    for path, meaning in [
        (CONFIG, "the config"),
        (DATA, "the verses"),
        (OUTPUT, "logs, metrics and checkpoints"),
        (ARCHIVE, "the trained model, a plain AllenNLP archive"),
        (TEST_METRICS, "what `allennlp evaluate` measured"),
        (PREDICTIONS, "what `allennlp predict` answered"),
    ]:
        print(f"  {str(path):<45} {meaning}")


def main() -> None:
    steps = [
        run("python", "demo/prepare_verses.py", DATA),
        allennlp("train", CONFIG, "-s", OUTPUT, "-f"),
        allennlp("evaluate", ARCHIVE, DATA / "test.jsonl", "--output-file", TEST_METRICS),
    ]
    write_sample()
    steps.append(allennlp("predict", ARCHIVE, SAMPLE, "--output-file", PREDICTIONS, "--silent"))
    report(steps)


if __name__ == "__main__":
    main()
