"""
Searches learning rate and dropout of the demo's classifier with optuna, in one process, and gives
up early what does badly. `python demo/search.py` needs the data of `make demo`.
"""

import allennlp_deepspeed  # noqa: F401  # first: it gives AllenNLP what it lacks

# isort: split

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Dict

import optuna
from allennlp.commands.train import train_model
from allennlp.common import Params
from allennlp.training.callbacks import TrainerCallback

CONFIG = "training_configs/verse_classifier.jsonnet"


@TrainerCallback.register("prune")
class Prune(TrainerCallback):
    """Tells optuna of each epoch, and ends the training if it says so."""

    trial: optuna.Trial

    def on_epoch(
        self, trainer: Any, metrics: Dict[str, Any], epoch: int, *args: Any, **kwargs: Any
    ) -> None:
        self.trial.report(metrics["validation_accuracy"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def accuracy(trial: optuna.Trial, overrides: Dict[str, Any]) -> float:
    changes = {
        "distributed": None,
        "trainer.optimizer.lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "model.dropout": trial.suggest_float("dropout", 0.0, 0.8),
        "trainer.callbacks": ["prune"],
        "trainer.checkpointer": None,
    }
    Prune.trial = trial
    with tempfile.TemporaryDirectory() as directory:
        train_model(Params.from_file(CONFIG, {**changes, **overrides}), directory)
        metrics = json.loads(Path(directory, "metrics.json").read_text())
    return metrics["best_validation_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--overrides", type=json.loads, default={}, help="as of `allennlp train`")
    args = parser.parse_args()
    sampler = optuna.samplers.TPESampler(seed=1)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(lambda trial: accuracy(trial, args.overrides), n_trials=args.trials)
    for trial in study.trials:
        print(trial.number, trial.state.name, trial.values, trial.params)
    print(f"Best: accuracy {study.best_value:.1%} with {study.best_params}")


if __name__ == "__main__":
    main()
