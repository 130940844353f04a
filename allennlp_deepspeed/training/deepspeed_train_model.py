import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional
from unittest import mock

from allennlp.commands.train import TrainModel
from allennlp.common import Lazy
from allennlp.common import util as common_util
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.trainer import Trainer
from typing_extensions import override

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.process.single_process import as_single_process
from allennlp_deepspeed.engine.process.worker_device import (
    capabilities,
    worker_device,
    workers_per_node,
)
from allennlp_deepspeed.engine.zero3.partitioned_construction import (
    PartitionedConstruction,
    is_partitioned,
)
from allennlp_deepspeed.training.validation_loss import evaluate

logger = logging.getLogger(__name__)

Arguments = Dict[str, Any]


@TrainModel.register("deepspeed", constructor="from_partial_objects")
class DeepSpeedTrainModel(TrainModel):
    """
    A `TrainModel` that constructs the model partitioned over the ranks at ZeRO stage 3, so that no
    rank ever has all of it in memory, see
    [`PartitionedConstruction`](../engine/zero3/partitioned_construction.py). It also evaluates the
    test set while all ranks and the engine still exist.

    Registered as a `TrainModel` with name "deepspeed": a top-level `"type": "deepspeed"` in the
    config. Its other keys are those of AllenNLP's.

    Works around AllenNLP 2.10.1: after training, only the primary evaluates the test set, which
    fails with several workers. Gone when all workers call `TrainModel.finish`.
    """

    @override
    def run(self) -> Dict[str, Any]:
        """Trains, and evaluates the test set if `evaluate_on_test`. Every rank must call it."""
        if not self.evaluate_on_test or self.evaluation_data_loader is None:
            return self.trainer.train()
        with self.trainer.session():  # type: ignore[attr-defined]
            metrics = self.trainer.train()
            logger.info("The model will be evaluated using the best epoch weights.")
            # Every rank evaluates the full test set in the same batches, so that sharded weights
            # are gathered for each batch, and any metric is that of a single process: AllenNLP's
            # own distributed evaluation leaves out instances and averages over other batches.
            with self.trainer.evaluation(), as_single_process():  # type: ignore[attr-defined]
                test_metrics = evaluate(
                    self.model,
                    self.evaluation_data_loader,
                    cuda_device=self.trainer.cuda_device,
                    batch_weight_key=self.batch_weight_key,
                )
        metrics.update({f"test_{key}": value for key, value in test_metrics.items()})
        return metrics

    @override
    def finish(self, metrics: Dict[str, Any]) -> None:
        """Writes the metrics. AllenNLP calls it on the primary only."""
        with mock.patch.object(self, "evaluate_on_test", False):
            super().finish(metrics)

    @classmethod
    @override
    def from_partial_objects(
        cls,
        serialization_dir: str,
        local_rank: int,
        dataset_reader: Lazy[DatasetReader],  # type: ignore[override]
        train_data_path: Any,
        model: Lazy[Model],
        data_loader: Lazy[DataLoader],
        trainer: Lazy[Trainer],
        vocabulary: Lazy[Vocabulary] = Lazy(Vocabulary),
        datasets_for_vocab_creation: List[str] = None,
        validation_dataset_reader: Lazy[DatasetReader] = None,  # type: ignore[override]
        validation_data_path: Any = None,
        validation_data_loader: Lazy[DataLoader] = None,
        test_data_path: Any = None,
        evaluate_on_test: bool = False,
        batch_weight_key: str = "",
        ddp_accelerator: Optional[DdpAccelerator] = None,
    ) -> TrainModel:
        """
        Constructs the train loop from a config file, whose top-level keys are the arguments of this
        method, as in AllenNLP. The readers are lazy so that the reader of the test set can be
        constructed again, unsharded.
        """
        arguments: Arguments = {
            "serialization_dir": serialization_dir,
            "local_rank": local_rank,
            "dataset_reader": dataset_reader.construct(),
            "train_data_path": train_data_path,
            "model": model,
            "data_loader": data_loader,
            "trainer": trainer,
            "vocabulary": vocabulary,
            "validation_dataset_reader": validation_dataset_reader.construct()
            if validation_dataset_reader is not None
            else None,
            "validation_data_path": validation_data_path,
            "validation_data_loader": validation_data_loader,
            "evaluate_on_test": evaluate_on_test,
            "batch_weight_key": batch_weight_key,
            "ddp_accelerator": ddp_accelerator,
        }
        if not common_util.is_distributed():
            arguments.update(
                datasets_for_vocab_creation=datasets_for_vocab_creation,
                test_data_path=test_data_path,
            )
            with _construct_partitioned(arguments):
                return super().from_partial_objects(**arguments)

        # With several workers the vocabulary has been constructed from all data before they
        # started, and each worker reads its shard. Each worker reads the full test set.
        with _construct_partitioned(arguments):
            train_loop = super().from_partial_objects(**arguments)
        if test_data_path is not None and evaluate_on_test:
            with as_single_process():
                reader = (validation_dataset_reader or dataset_reader).construct()
                test_data_loader = (validation_data_loader or data_loader).construct(
                    reader=reader, data_path=test_data_path
                )
            test_data_loader.index_with(train_loop.model.vocab)
            train_loop.evaluation_data_loader = test_data_loader
        return train_loop


@contextmanager
def _construct_partitioned(arguments: Arguments) -> Iterator[None]:
    """
    Context manager that constructs the `"model"` partitioned at ZeRO stage 3. The process stays
    prepared for DeepSpeed until the trainer has been constructed, which is responsible for it then.
    """
    trainer = arguments["trainer"]._params.as_dict(quiet=True)
    device = worker_device(trainer.get("cuda_device"))
    world_size = trainer.get("world_size", 1)
    deepspeed_config = DeepSpeedConfig.from_value(trainer.get("deepspeed_config"))
    partitioning = deepspeed_config.partitioning(
        TrainerSettings.from_config(
            {"trainer": trainer},
            deepspeed_config.config,
            world_size=world_size,
            workers_per_node=workers_per_node(world_size),
            serialization_dir=arguments["serialization_dir"],
            **capabilities(device),
        )
    )
    if not is_partitioned(partitioning):
        yield
        return
    model, local_rank = arguments["model"], arguments["local_rank"]

    def construct(**extras: Any) -> Model:
        with PartitionedConstruction(partitioning, device, local_rank) as construction:
            constructed = model.construct(**extras)
            construction.finish(constructed)
        return constructed

    arguments["model"] = Lazy(construct)
    with process_environment(device, local_rank):
        yield
