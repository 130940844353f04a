"""One training of an experiment, in processes of its own and under a time limit."""

import copy
import faulthandler
import gc
import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from allennlp.commands.train import TrainModel
from allennlp.common import Params
from allennlp.common import util as common_util
from allennlp.common.checks import ConfigurationError
from allennlp.data import DataLoader
from allennlp.models import Model, archive_model, load_archive
from allennlp.modules.encoder_base import _EncoderBase
from allennlp.nn.parallel import TorchDdpAccelerator
from allennlp.predictors import Predictor
from allennlp.training import TrainerCallback
from allennlp.training.callbacks import ConfidenceChecksCallback
from allennlp.training.callbacks.confidence_checks import ConfidenceCheckError
from allennlp.training.util import evaluate, make_vocab_from_params

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.launch import train_command
from evidence.model_library.experiments import prepare_each_forward

TIME_LIMIT = 600  # seconds
GRACE = 5

# AllenNLP's callbacks with this name's beginning call backward.
MITIGATOR = "adversarial_bias_mitigator"

Weights = Dict[str, Any]


class Outcome(NamedTuple):
    """
    # Parameters

    weights : `Dict[str, np.ndarray]`, optional (default = `None`)
        After the last epoch.
    initial : `Dict[str, np.ndarray]`, optional (default = `None`)
        Before the first step.
    trainable : `List[str]`, optional (default = `None`)
        Names of parameters before the first step.
    refusal : `str`, optional (default = `""`)
    failure : `str`, optional (default = `""`)
    checked : `List[str]`, optional (default = `None`)
        The names of the layers that were called under the eyes of AllenNLP's confidence checks, in
        this order, without those that wrap the model; `None` without checks.
    detected : `List[Tuple[str, str]]`, optional (default = `None`)
        Those of them that the checks found fault with, which ended the training.
    """

    weights: Optional[Weights] = None
    initial: Optional[Weights] = None
    trainable: Optional[List[str]] = None
    refusal: str = ""
    failure: str = ""
    checked: Optional[List[str]] = None
    detected: Optional[List[Tuple[str, str]]] = None


def in_processes(
    world_size: int, work: Callable[[int], Outcome], time_limit: float = TIME_LIMIT
) -> List[Outcome]:
    """What each has returned, or how it has ended. Forked, so that nothing is imported again."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, rank, sender))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    outcomes: List[Optional[Outcome]] = [None] * world_size
    end = time.monotonic() + time_limit
    pending = dict(enumerate(receivers))
    while pending and time.monotonic() < end:
        for ready in wait(list(pending.values()), timeout=end - time.monotonic()):
            rank = receivers.index(ready)
            del pending[rank]
            try:
                outcomes[rank] = ready.recv()
            except EOFError:
                processes[rank].join()
                outcomes[rank] = Outcome(failure=f"ends with {processes[rank].exitcode}")
            if outcomes[rank].failure or outcomes[rank].refusal:  # type: ignore[union-attr]
                end = min(end, time.monotonic() + GRACE)
    for process in processes:
        process.join(GRACE)
        process.kill()
        process.join()
    return [outcome or Outcome(failure="waits for ever") for outcome in outcomes]


def _run(work: Callable[[int], Outcome], rank: int, sender: Any) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    log = os.environ.get("TRIAL_LOG")
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    faulthandler.dump_traceback_later(TIME_LIMIT - 5, file=sys.__stderr__)
    try:
        outcome = work(rank)
    except ConfigurationError as error:
        traceback.print_exc()
        outcome = Outcome(refusal=in_short(error))
    except BaseException as error:  # of any kind
        traceback.print_exc()
        outcome = Outcome(failure=in_short(error))
    sender.send(outcome)
    sender.close()
    os._exit(0)


def in_short(error: BaseException) -> str:
    text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(text).split())[:400]


@TrainerCallback.register("weights_of_trial")
class _Weights(TrainerCallback):
    """Takes the weights after each epoch, before the best ones come back."""

    taken: ClassVar[Optional[Weights]] = None

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(trainer, DeepSpeedTrainer):
            with trainer.modified_weights():
                _Weights.taken = _arrays(trainer.model)
        else:
            _Weights.taken = _arrays(trainer.model)


@TrainerCallback.register(f"{MITIGATOR}_of_the_mean")
class _AdversarialBiasMitigatorOfTheMean(TrainerCallback):
    """
    What AllenNLP's "adversarial_bias_mitigator_backward" does with the mean of the gradients of two
    micro-batches, as of two workers. Its own would do it with each, and lose the first one's.
    """

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._first: Optional[List[torch.Tensor]] = None

    def on_backward(self, trainer: Any, batch_outputs: Any, *args: Any, **kwargs: Any) -> bool:
        model = trainer.model
        predictor, adversary = (
            [p for p in module.parameters() if p.requires_grad]
            for module in (model.predictor, model.adversary)
        )
        gradients = [
            *_gradients(batch_outputs["adversary_loss"], [*predictor, *adversary]),
            *_gradients(batch_outputs["loss"], predictor),
        ]
        if self._first is None:
            self._first = gradients
            return True
        mean = [(first + second) / 2 for first, second in zip(self._first, gradients)]
        self._first = None
        of_adversary = mean[: len(predictor)]
        of_loss = mean[len(predictor) + len(adversary) :]
        for parameter, hers, own in zip(predictor, of_adversary, of_loss):
            if own.any():
                unit = hers / torch.linalg.norm(hers)
                parameter.grad = own - (own * unit * unit).sum() - hers
        for parameter, gradient in zip(adversary, mean[len(predictor) :]):
            parameter.grad = gradient
        return True


def _gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters)]


def _arrays(model: torch.nn.Module) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def make_vocabulary(config: Dict[str, Any], folder: Path) -> Dict[str, Any]:
    """The config with a vocabulary that is read from files, as workers have it."""

    def work(rank: int) -> Outcome:
        params = Params(config)
        common_util.prepare_environment(params)
        make_vocab_from_params(params, str(folder))
        return Outcome()

    (outcome,) = in_processes(1, work)
    if outcome.failure or outcome.refusal:
        raise RuntimeError(outcome.failure or outcome.refusal)
    vocabulary = {"type": "from_files", "directory": str(folder / "vocabulary")}
    return {**config, "vocabulary": vocabulary}


def train(
    config: Dict[str, Any],
    world_size: int,
    folder: Path,
    prepare: Optional[Callable[[Model], None]] = None,
    time_limit: float = TIME_LIMIT,
) -> Outcome:
    """Returns rank 0's weights, or the message of the first rank that failed."""
    folder.mkdir()
    # Callbacks of projects read it, which `allennlp train` has written.
    (folder / "config.json").write_text(json.dumps(config))

    def work(rank: int) -> Outcome:
        return _train(config, rank, world_size, folder, prepare)

    outcomes = in_processes(world_size, work, time_limit)
    failed = [o for o in outcomes if o.failure or o.refusal]
    # Others lose their connection to the one that has failed, or wait for it.
    failed.sort(key=lambda o: "onnection" in o.failure or o.failure == "waits for ever")
    return failed[0] if failed else outcomes[0]


def _train(
    config: Dict[str, Any],
    rank: int,
    world_size: int,
    folder: Path,
    prepare: Optional[Callable[[Model], None]],
) -> Outcome:
    params = Params(copy.deepcopy(config))
    trainer = params.params["trainer"]
    trainer["callbacks"] = [*trainer.get("callbacks", []), "weights_of_trial"]
    if config["trainer"].get("type") == "deepspeed":
        train_command.check(params.duplicate())
    common_util.prepare_environment(params)
    params.pop("distributed", None)
    if world_size > 1:
        trainer.update(local_rank=rank, cuda_device=-1, world_size=world_size, distributed=True)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
    extras: Dict[str, Any] = {}
    if world_size > 1 and config["trainer"].get("type") != "deepspeed":
        # As the key 'distributed.ddp_accelerator' has it. The default `False` raises where a batch
        # leaves parameters unused.
        extras["ddp_accelerator"] = TorchDdpAccelerator(
            find_unused_parameters=True,
            local_rank=rank,
            world_size=world_size,
            cuda_device=torch.device("cpu"),
        )
    loop = TrainModel.from_params(params, serialization_dir=str(folder), local_rank=rank, **extras)
    is_ours = isinstance(loop.trainer, DeepSpeedTrainer)
    initial = None if is_ours else _arrays(loop.model)
    trainable = [name for name, p in loop.model.named_parameters() if p.requires_grad]
    own_ranks = [rank] if world_size > 1 else range(config["data_loader"].get("world_size", 1))
    prepare_each_forward(loop.model, own_ranks)
    if prepare is not None:
        prepare(loop.model)
    try:
        loop.trainer.train()
    except ConfidenceCheckError as error:
        return Outcome(failure=in_short(error), **_confidence_checks(loop.trainer))
    if world_size > 1:
        dist.barrier()
    seen = _confidence_checks(loop.trainer)
    return Outcome(weights=_Weights.taken, initial=initial, trainable=trainable, **seen)


def _confidence_checks(trainer: Any) -> Dict[str, Any]:
    """Returns what the checks of rank 0 have seen, as fields of an `Outcome`."""
    for callback in trainer._callbacks:
        verification = getattr(callback, "_verification", None)
        if isinstance(callback, ConfidenceChecksCallback) and verification is not None:
            names = [_own_name(name) for name, _ in verification._module_sequence]
            pairs = [(_own_name(a), _own_name(b)) for a, b in verification.detected_pairs]
            return {"checked": [name for name in names if name], "detected": pairs}
    return {}


def _own_name(name: str) -> str:
    """The name in the model, without that of `DistributedDataParallel`'s, which has it inside."""
    return "" if name == "module" else name.removeprefix("module.")


def round_differently(model: Model) -> None:
    """Multiplies the loss by 3 and divides each gradient by 3, which changes its last digit."""

    def scale(module: Any, args: Any, output: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        if module.training and torch.is_grad_enabled():
            output["loss"] = output["loss"] * 3
        return output

    model.register_forward_hook(scale)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / 3)


def zero_unused_gradients(model: Model) -> None:
    """Gives a parameter that no batch uses a gradient of 0 instead of `None`."""

    def fill(module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            if module.training and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    model.register_forward_pre_hook(fill)


def use_archive(config: Dict[str, Any], vocabulary: Path, folder: Path) -> str:
    """What becomes of the archive of a training in `folder`: empty if all is well."""

    def work(rank: int) -> Outcome:
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copytree(vocabulary, folder / "vocabulary", dirs_exist_ok=True)
        archive_model(str(folder), weights="best.th")
        archive = load_archive(str(folder / "model.tar.gz"))
        loader_params = dict(config.get("validation_data_loader", config["data_loader"]))
        loader_params.pop("shuffle", None)
        loader = DataLoader.from_params(
            Params(copy.deepcopy(loader_params)),
            reader=archive.validation_dataset_reader,
            data_path=config["validation_data_path"],
        )
        loader.index_with(archive.model.vocab)
        metrics = evaluate(archive.model, loader)
        first = next(iter(loader.iter_instances()))
        Predictor.from_archive(archive).predict_instance(first)
        again = Model.from_archive(str(folder / "model.tar.gz"))
        metrics_again = evaluate(again, loader)
        # As text, in which NaN is NaN.
        assert metrics and str(metrics_again) == str(metrics), f"{metrics} {metrics_again}"
        return Outcome()

    (outcome,) = in_processes(1, work)
    return outcome.failure or outcome.refusal


def restore_states_of_training(model: torch.nn.Module) -> None:
    """
    Has an encoder that goes on with the states of the batch before, in the next epoch too, go on
    with those of the last batch of the training. Those of the validation are of other batches in
    each worker than in one process.
    """
    stateful = [module for module in model.modules() if isinstance(module, _EncoderBase)]
    states: Dict[Any, Any] = {}

    def before(module: torch.nn.Module, *_: Any) -> None:
        for encoder in stateful if module.training else []:
            encoder._states = states.get(encoder)

    def after(module: torch.nn.Module, *_: Any) -> None:
        if module.training:
            states.update({encoder: encoder._states for encoder in stateful})

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
