"""Faults of AllenNLP's, some of them on today's PyTorch only."""

import inspect
import io
import sys
import tarfile
from tempfile import TemporaryDirectory
from threading import Thread
from types import SimpleNamespace
from typing import Any, Callable, List

import numpy as np
import torch
from allennlp.commands import train as train_command
from allennlp.common import cached_transformers
from allennlp.common import tqdm as allennlp_tqdm
from allennlp.confidence_checks.normalization_bias_verification import NormalizationBiasVerification
from allennlp.data import Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.data.data_loaders.data_collator import LanguageModelingDataCollator
from allennlp.data.dataset_readers import SequenceTaggingDatasetReader
from allennlp.fairness import Separation, Sufficiency
from allennlp.models.archival import archive_model
from allennlp.modules.seq2vec_encoders import CnnEncoder
from allennlp.nn.util import tiny_value_of_dtype
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import ConfidenceChecksCallback, WandBCallback
from allennlp.training.learning_rate_schedulers import ReduceOnPlateauLearningRateScheduler
from allennlp.training.metric_tracker import MetricTracker
from allennlp.training.metrics import (
    BLEU,
    AttachmentScores,
    Auc,
    Covariance,
    PearsonCorrelation,
    SpanBasedF1Measure,
    SpearmanCorrelation,
)
from tensorboardX.event_file_writer import EventFileWriter
from tensorboardX.proto.event_pb2 import Event
from transformers import BertConfig

from tests.upstream.unpatched import worked_around_by


@worked_around_by("allennlp_patches.construct_reduce_on_plateau_without_verbose")
def test_reduce_on_plateau_cannot_be_constructed() -> bool:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return _fails(lambda: ReduceOnPlateauLearningRateScheduler(optimizer))


@worked_around_by("allennlp_patches.allow_numpy_scalars_in_training_states")
def test_training_states_with_numpy_scalars_cannot_be_loaded() -> bool:
    file = io.BytesIO()
    torch.save({"best_so_far": np.float64(1)}, file)
    file.seek(0)
    return _fails(lambda: torch.load(file))


@worked_around_by("allennlp_patches.support_bf16_in_tiny_value_of_dtype")
def test_masks_refuse_bf16() -> bool:
    return _fails(lambda: tiny_value_of_dtype(torch.bfloat16))


@worked_around_by("allennlp_patches.mask_short_texts_of_cnns_in_any_precision")
def test_a_text_that_is_shorter_than_a_filter_has_huge_features_in_half_precision() -> bool:
    encoder = CnnEncoder(embedding_dim=1, num_filters=1, ngram_filter_sizes=(2,))
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(torch.ones(1, 2, 1), torch.tensor([[True, False]]))
    return features.abs().max().item() > 1e38


@worked_around_by("launch.log_files._discard_events")
def test_adding_events_waits_forever_when_the_thread_of_a_writer_has_ended() -> bool:
    with TemporaryDirectory() as directory:
        writer = EventFileWriter(directory, max_queue_size=1)
        # The thread of the writer ends with the first event, and the second one stays in the queue.
        writer._ev_writer.write_event = lambda event: sys.exit()
        adding = Thread(target=lambda: [writer.add_event(Event()) for _ in range(3)], daemon=True)
        adding.start()
        adding.join(10)
        waits = adding.is_alive()
        while adding.is_alive():
            writer._event_queue.get()
        return waits


@worked_around_by("allennlp_patches.share_locks_of_spawned_loader_workers")
def test_spawned_loader_workers_are_given_a_lock_of_another_start_method() -> bool:
    with TemporaryDirectory() as directory:
        path = f"{directory}/data"
        with open(path, "w") as file:
            file.write("a###X\tb###Y\n" * 4)
        loader = MultiProcessDataLoader(
            SequenceTaggingDatasetReader(),
            path,
            batch_size=2,
            num_workers=1,
            max_instances_in_memory=2,
            start_method="spawn",
        )
        return _fails(lambda: next(iter(loader.iter_instances())))


@worked_around_by("allennlp_patches.archive_from_any_directory")
def test_nothing_is_archived_in_addition_from_a_directory_with_brackets() -> bool:
    with TemporaryDirectory(suffix="[lr=0.1]") as directory:
        for name in ("config.json", "weights.th", "vocabulary", "notes.txt"):
            open(f"{directory}/{name}", "w").close()
        path = archive_model(directory, "weights.th", include_in_archive=["*.txt"])
        with tarfile.open(path) as archive:
            return "notes.txt" not in archive.getnames()


@worked_around_by("allennlp_patches.mask_tokens_with_the_given_probability")
def test_the_probability_of_masks_is_passed_as_another_argument() -> bool:
    with TemporaryDirectory() as directory:
        with open(f"{directory}/vocab.txt", "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
        with open(f"{directory}/tokenizer_config.json", "w") as file:
            file.write('{"tokenizer_class": "BertTokenizer"}')
        collator = LanguageModelingDataCollator(directory, mlm_probability=0.5)
    return collator._collator.mlm_probability != 0.5


@worked_around_by("allennlp_patches.tell_cached_transformers_apart")
def test_a_transformer_is_that_of_other_arguments() -> bool:
    with TemporaryDirectory() as directory:
        config = BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1)
        config.save_pretrained(directory)
        first, second = [
            cached_transformers.get(
                directory, make_copy=True, load_weights=False, attn_implementation=implementation
            )
            for implementation in ("eager", "sdpa")
        ]
    return second.config._attn_implementation == first.config._attn_implementation


@worked_around_by("allennlp_patches.show_progress_without_widgets")
def test_bars_in_notebooks_are_made_of_widgets() -> bool:
    """By its source, because it takes a notebook."""
    return "import tqdm_notebook as _tqdm" in inspect.getsource(allennlp_tqdm)


@worked_around_by("allennlp_patches.name_runs_of_wandb")
def test_runs_of_wandb_have_no_id() -> bool:
    import wandb  # half a second, which other tests need not wait

    calls_it = "wandb.util.generate_id()" in inspect.getsource(WandBCallback)
    return calls_it and not hasattr(wandb.util, "generate_id")


@worked_around_by("metrics.distributed_metrics")
def test_metrics_refuse_several_workers() -> bool:
    metrics = (Covariance(), PearsonCorrelation(), SpanBasedF1Measure(Vocabulary()))
    return any("currently not supported" in _failure(metric.get_metric) for metric in metrics)


@worked_around_by("metrics.distributed_metrics")
def test_metrics_gather_what_they_have_gathered() -> bool:
    """By their sources, because it takes several workers."""
    sources = [inspect.getsource(metric.__call__) for metric in (Auc, SpearmanCorrelation)]
    return any("dist.all_gather(_" in source for source in sources)


@worked_around_by("metrics.distributed_metrics")
def test_metrics_reduce_what_is_no_count() -> bool:
    """By their sources, because it takes several workers."""
    divides = ") / world_size" in inspect.getsource(BLEU.__call__)
    return divides or "(correct_indices).sum()" in inspect.getsource(AttachmentScores.__call__)


@worked_around_by("metrics.distributed_metrics")
def test_metrics_reduce_the_counts_of_the_last_label() -> bool:
    """By their sources, because it takes several workers."""
    reduces_last = [
        "dist.all_reduce(_predicted_label_counts_by_gold_label[y]"
        in inspect.getsource(Separation.__call__),
        "dist.all_reduce(_gold_label_counts_by_predicted_label[c]"
        in inspect.getsource(Sufficiency.__call__),
    ]
    return any(reduces_last)


@worked_around_by("training.callbacks.skip_confidence_checks")
def test_a_compiled_model_is_compiled_anew_while_its_normalizations_are_verified() -> bool:
    from torch._dynamo.utils import counters

    model = torch.nn.Linear(1, 1)
    NormalizationBiasVerification(model).register_hooks()
    compiled = torch.compile(lambda inputs: model(inputs), backend="eager")
    counters.clear()
    for _ in range(4):
        compiled(torch.ones(1))
    return counters["stats"]["unique_graphs"] == 4


@worked_around_by("training.callbacks.skip_confidence_checks")
def test_a_training_that_is_continued_gathers_layers_forever() -> bool:
    callback, model = ConfidenceChecksCallback("unused"), torch.nn.Linear(1, 1)
    trainer: Any = SimpleNamespace(_pytorch_model=model)
    callback.on_start(trainer)
    callback.on_batch(trainer, [], [], {}, epoch=1, batch_number=1, is_training=True)
    return len(model._forward_hooks) > 0


@worked_around_by("training.deepspeed_train_model.DeepSpeedTrainModel")
def test_the_primary_alone_evaluates_the_test_set() -> bool:
    """By the source, because it takes several workers."""
    source = inspect.getsource(train_command._train_worker)
    return "if primary:\n        train_loop.finish(metrics)" in source


@worked_around_by("training.metric_tracker.FirstMetrics")
def test_a_training_that_is_continued_at_its_end_returns_no_metrics() -> bool:
    metrics, _ = _train(_trainer(num_epochs=1, epochs_before=1))
    return metrics.keys() == {"best_epoch"}


@worked_around_by("training.trainer.DeepSpeedTrainer._maybe_restore_checkpoint")
def test_a_training_that_has_stopped_early_trains_one_more_epoch() -> bool:
    trainer = _trainer(num_epochs=3, epochs_before=1)
    trainer._metric_tracker.should_stop_early = lambda: True
    _train(trainer)
    return trainer.epochs == [0, 1]


@worked_around_by("training.trainer.DeepSpeedTrainer.save_best_weights")
def test_the_best_weights_are_saved_after_the_checkpoint() -> bool:
    saved: List[str] = []
    trainer = _trainer(num_epochs=1, epochs_before=0)
    trainer._metric_tracker.is_best_so_far = lambda: True
    trainer._save_model_state = lambda path: saved.append("best weights")
    trainer._checkpointer = SimpleNamespace(
        maybe_save_checkpoint=lambda *args: saved.append("checkpoint")
    )
    with TemporaryDirectory() as directory:
        trainer._serialization_dir = directory
        _train(trainer)
    return saved == ["checkpoint", "best weights"]


def _trainer(num_epochs: int, epochs_before: int) -> Any:
    """What AllenNLP's loop asks of a trainer. `epochs` are those that it has gone through."""
    epochs: List[int] = []

    def train_epoch(epoch: int) -> Any:
        epochs.append(epoch)
        return {"loss": 1.0}

    return SimpleNamespace(
        epochs=epochs,
        _train_epoch=train_epoch,
        _num_epochs=num_epochs,
        _start_after_epochs_completed=epochs_before,
        _epochs_completed=0,
        _batches_in_epoch_completed=0,
        _metric_tracker=MetricTracker("-loss"),
        _should_validate_this_epoch=True,
        _validation_data_loader=None,
        _serialization_dir=None,
        _primary=True,
        _distributed=False,
        _learning_rate_scheduler=None,
        _momentum_scheduler=None,
        _moving_average=None,
        _checkpointer=None,
        _callbacks=[],
        _ddp_wrapped_model=None,
        _best_model_filename=None,
        _finalize_model=lambda: None,
    )


def _train(trainer: Any) -> Any:
    return GradientDescentTrainer._try_train(trainer)


def _fails(function: Callable[[], Any]) -> bool:
    return bool(_failure(function))


def _failure(function: Callable[[], Any]) -> str:
    """What it raises, or nothing."""
    try:
        function()
    except Exception as error:
        return repr(error)
    return ""
