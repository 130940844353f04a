"""
What a case is compared with: a training loop written out in plain PyTorch, in one process. Workers
are turns that it takes, half precision is fp32 master weights that are copied into a model in half
precision.

Of AllenNLP it takes the optimizers, the schedules, the moving average and the regularizer as they
are; nothing of this package.
"""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional

import torch
from allennlp.common import Params
from allennlp.data import Batch, Vocabulary
from allennlp.models import Model
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.moving_average import ExponentialMovingAverage
from allennlp.training.optimizers import Optimizer

from tests.cross.case import CLIPPING, MOVING_AVERAGE, OPTIMIZERS, SCHEDULERS, Case
from tests.cross.data import Example, batches_of, validation_batches_of
from tests.cross.model import to_instance

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trained(NamedTuple):
    """
    What a training has left.

    # Parameters

    initial : `Dict[str, torch.Tensor]`
        The state dict before it.
    weights : `Dict[str, torch.Tensor]`
        The state dict after it, of the best epoch.
    losses : `List[List[float]]`
        Of each step, on each rank.
    norms : `List[float]`
        Of the whole gradient before clipping, of each step.
    validation_losses : `List[float]`
        Of each epoch.
    """

    initial: Dict[str, torch.Tensor]
    weights: Dict[str, torch.Tensor]
    losses: List[List[float]]
    norms: List[float]
    validation_losses: List[float]


class Fault(NamedTuple):
    """
    What a wrong trainer might do to the gradient of one micro-batch of a rank: `factor` is 0 if it
    is lost and 2 if it counts twice. `step` is counted from 0, over all epochs.
    """

    step: int
    rank: int
    micro_batch: int
    factor: float


def train_plainly(case: Case, fault: Optional[Fault] = None) -> Trained:
    """Trains a case. In half precision it rounds where half precision does."""
    return _PlainTrainer(case, fault).train()


class _PlainTrainer:
    def __init__(self, case: Case, fault: Optional[Fault]) -> None:
        self.case, self.fault = case, fault
        self.model = Model.from_params(Params(deepcopy(case.model())), vocab=Vocabulary())
        if case.precision in HALF:
            # DeepSpeed makes its fp32 master weights of the model's, which it has rounded. A single
            # process goes on from the weights that it was given, but for frozen ones.
            for parameter in self.model.parameters():
                if case.workers > 1 or not parameter.requires_grad:
                    parameter.data = parameter.data.to(HALF[case.precision]).float()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = Optimizer.from_params(
            model_parameters=[list(pair) for pair in named],
            params=Params(deepcopy(OPTIMIZERS[case.optimizer])),
        )
        self.scheduler = None
        if case.scheduler is not None:
            self.scheduler = LearningRateScheduler.from_params(
                Params(deepcopy(SCHEDULERS[case.scheduler])),
                optimizer=self.optimizer,
                num_epochs=case.num_epochs,
                num_steps_per_epoch=-(-case.num_batches_of(0) // case.accumulation),
            )
        self.average = None
        if case.moving_average:
            settings = {key: MOVING_AVERAGE[key] for key in MOVING_AVERAGE if key != "type"}
            self.average = ExponentialMovingAverage(named, **settings)
        # Of each rank's dropout.
        self.random_states = []
        for rank in range(case.workers):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(case.seed + rank)
                self.random_states.append(torch.get_rng_state())
        self.num_steps = 0
        self.losses: List[List[float]] = [[] for _ in range(case.workers)]
        self.norms: List[float] = []
        self.scale = 1.0
        if case.precision == "fp16":
            self.scale = 2.0**case.loss_scale_power

    def train(self) -> Trained:
        case = self.case
        initial = deepcopy(self.model.state_dict())
        best, best_weights = float("inf"), initial
        validation_losses = []
        for _ in range(case.num_epochs):
            self._train_epoch()
            with self._averaged():
                if case.validation:
                    validation_losses.append(self._validation_loss())
                if not case.validation or validation_losses[-1] < best:
                    best = validation_losses[-1] if case.validation else best
                    best_weights = deepcopy(self.model.state_dict())
            if self.scheduler is not None:
                self.scheduler.step(-validation_losses[-1] if case.validation else None)
        return Trained(initial, best_weights, self.losses, self.norms, validation_losses)

    def _averaged(self) -> ContextManager:
        if self.average is None:
            return nullcontext()
        average = self.average

        class Averaged:
            def __enter__(self) -> None:
                average.assign_average_value()

            def __exit__(self, *_: Any) -> None:
                average.restore()

        return Averaged()

    def _train_epoch(self) -> None:
        case = self.case
        batches = [_tensors(batches_of(case, rank)) for rank in range(case.workers)]
        num_batches = min(map(len, batches))
        for start in range(0, num_batches, case.accumulation):
            stop = min(start + case.accumulation, num_batches)
            # A rank divides by the number of micro-batches that it has, even if another one lacks
            # some of them.
            sizes = [min(case.accumulation, len(own) - start) for own in batches]
            self._step([own[start:stop] for own in batches], sizes)

    def _step(self, micro_batches: List[List[Any]], sizes: List[int]) -> None:
        """Of shape (workers, micro-batches)."""
        case = self.case
        model = self._computing_model()
        computing = [p for p in model.parameters() if p.requires_grad]
        # The mean over ranks of each rank's sum over micro-batches.
        gradients: List[Optional[torch.Tensor]] = [None] * len(computing)
        losses = [0.0] * case.workers
        for i in range(len(micro_batches[0])):
            by_rank = [own[i] for own in micro_batches]
            for rank, loss, passes_backward in self._losses(model, by_rank):
                if not passes_backward:
                    losses[rank] += float(loss) / sizes[rank]
                    continue
                # Of a contrastive loss, which there is one of for all ranks.
                share = 1 if case.contrastive else case.workers
                if not case.contrastive:
                    losses[rank] += float(loss) / sizes[rank]
                (loss * (self.scale / sizes[rank])).backward()
                counts = 1.0
                if self.fault is not None and self.fault[:3] == (self.num_steps, rank, i):
                    counts = self.fault.factor
                for j, parameter in enumerate(computing):
                    if parameter.grad is not None:
                        gradient = counts * parameter.grad.float() / (self.scale * share)
                        previous = gradients[j]
                        gradients[j] = gradient if previous is None else previous + gradient
                        parameter.grad = None
        for rank in range(case.workers):
            self.losses[rank].append(losses[rank])
        self._update(gradients)

    def _losses(self, model: Model, by_rank: List[Any]) -> Any:
        """
        A rank, its loss, and whether it is to be passed backward. One at a time, because each
        forward pass changes the buffers.
        """
        if not self.case.contrastive:
            for rank, batch in enumerate(by_rank):
                with self._of_rank(rank, model), self._autocast():
                    loss = model(**batch)["loss"]
                yield rank, self._with_penalty(model, loss), True
            return
        representations = []
        for rank, batch in enumerate(by_rank):
            with self._of_rank(rank, model), self._autocast():
                for chunk in _chunks(batch, self.case.chunk_size):
                    representations.append(model.encode(**model.encoder_inputs(chunk)))
        whole = {
            key: torch.cat([chunk[key] for chunk in representations]) for key in representations[0]
        }
        with self._autocast():
            loss = model.contrastive_loss(whole)["loss"]
        loss = self._with_penalty(model, loss)
        for rank in range(1, self.case.workers):
            yield rank, loss.detach(), False
        yield 0, loss.detach(), False
        yield 0, loss, True

    def _with_penalty(self, model: Model, loss: torch.Tensor) -> torch.Tensor:
        penalty = model.get_regularization_penalty()
        return loss if penalty is None else loss + penalty

    def _computing_model(self) -> Model:
        """The model in the precision in which it computes."""
        self.model.train()
        if self.case.precision not in HALF:
            return self.model
        return deepcopy(self.model).to(HALF[self.case.precision])

    def _of_rank(self, rank: int, model: Model) -> ContextManager:
        """
        Takes a rank's turn: with its random state, and, unless it is rank 0, without an effect on
        buffers, because those of rank 0 are what all ranks get before each forward pass.
        """
        trainer = self

        class Turn:
            def __enter__(self) -> None:
                self.buffers = deepcopy(dict(model.named_buffers()))
                self.state = torch.get_rng_state()
                torch.set_rng_state(trainer.random_states[rank])

            def __exit__(self, *_: Any) -> None:
                trainer.random_states[rank] = torch.get_rng_state()
                torch.set_rng_state(self.state)
                for (name, own), buffer in zip(
                    trainer.model.named_buffers(), model.buffers(), strict=True
                ):
                    if rank == 0:
                        own.data.copy_(buffer)
                    elif trainer.case.workers > 1:
                        buffer.data.copy_(self.buffers[name])
                _renormalize(trainer.model)

        return Turn()

    def _autocast(self) -> ContextManager:
        if self.case.precision == "fp32":
            return nullcontext()
        return torch.autocast("cpu", dtype=HALF.get(self.case.precision, torch.bfloat16))

    def _update(self, gradients: List[Optional[torch.Tensor]]) -> None:
        case = self.case
        passes_over = case.stage == 0 and case.precision not in HALF
        for parameter, gradient in zip(self.parameters, gradients):
            # DeepSpeed steps a parameter that nobody has used with a gradient of zero, except where
            # the optimizer is a plain one.
            if gradient is None and not passes_over:
                gradient = torch.zeros_like(parameter)
            parameter.grad = gradient
        norms = [p.grad.double().norm() for p in self.parameters if p.grad is not None]
        total = torch.stack(norms).norm()
        self.norms.append(float(total))
        settings = CLIPPING.get(case.clipping or "", {})
        max_norm, max_value = settings.get("grad_norm"), settings.get("grad_clipping")
        if isinstance(max_norm, float):
            torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, max_value)
        self.num_steps += 1
        if self.scheduler is not None:
            self.scheduler.step_batch(self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.apply(self.num_steps)

    def _validation_loss(self) -> float:
        model = self._computing_model().eval()
        self.model.eval()
        losses = []
        with torch.no_grad(), self._autocast():
            for batch in _tensors(validation_batches_of(self.case, 0)):
                losses.append(float(model(**batch)["loss"]))
        return sum(losses) / len(losses)


def _tensors(batches: List[List[Example]]) -> List[Any]:
    return [Batch(map(to_instance, batch)).as_tensor_dict() for batch in batches]


def _chunks(batch: Dict[str, torch.Tensor], size: Optional[int]) -> Any:
    length = len(batch["tokens"])
    size = size or length
    for start in range(0, length, size):
        yield {key: tensor[start : start + size] for key, tensor in batch.items()}


@torch.no_grad()
def _renormalize(model: Model) -> None:
    """What an embedding with `max_norm` does to the weights of the tokens that it looks up: all."""
    embedding = model.body.embedding
    if embedding.max_norm is not None:
        rows = torch.arange(embedding.num_embeddings)
        torch.embedding_renorm_(embedding.weight.data, rows, embedding.max_norm, 2.0)
