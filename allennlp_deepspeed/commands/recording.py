"""
Callback that records the steps of a short training, so that several can be compared.
"""

import itertools
import time
import zlib
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from allennlp.nn.util import dist_reduce_sum
from allennlp.training.callbacks import TrainerCallback
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from allennlp_deepspeed.commands.trial import peak_memory
from allennlp_deepspeed.engine.parameters.full_parameters import full_state_dict
from allennlp_deepspeed.training.loss_terms import averages_over_tokens

LOSS, NORM = "the loss", "the gradient norm"

# The number of elements of each parameter that are recorded.
_NUM_ELEMENTS = 65_536


class RecordingCallback(TrainerCallback):
    """
    Ends a training after some steps, and records each. Not registered: a comparison adds it to the
    callbacks of the config.

    # Parameters

    serialization_dir : `str`, required.
    directory : `str`, required.
        That of the comparison.
    run : `str`, required.
        The name of the training.
    is_first : `bool`, required.
        Whether it trains with this package, and records its weights and batches. The others train
        with them.
    num_batches : `int`, required.
        The number of micro-batches of each rank.
    ranks : `List[int]`, required.
        The ranks of the first training that read different data.
    noise : `float`, optional (default = `0`)
        The weights are multiplied by random numbers that differ from 1 by at most this.
    """

    # The trainer needs not wait for the metrics of a step.
    reads_metrics = False

    def __init__(
        self,
        serialization_dir: str,
        directory: str,
        run: str,
        is_first: bool,
        num_batches: int,
        ranks: List[int],
        noise: float = 0,
    ) -> None:
        super().__init__(serialization_dir)
        self._directory = Path(directory)
        self._run = run
        self._is_first = is_first
        self._num_batches = num_batches
        self._ranks = ranks
        self._noise = noise
        self._rank, self._world_size = 0, 1
        self._step = 0
        self._numbers: Iterator[int] = iter(())
        # "draws": for each batch with which the model draws random numbers, the state after it.
        self._notes: Dict[str, Any] = {"draws": {}, "unused": []}

    @override
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        trainer._num_epochs = 1
        trainer._should_validate_this_epoch = False
        # At the end of the epoch, where some ask for its validation. All steps have been compared.
        for schedule in (trainer._learning_rate_scheduler, trainer._momentum_scheduler):
            if schedule is not None:
                schedule.step = lambda metric=None: None
        # A list is all that a trainer needs.
        trainer.data_loader = self._batches(trainer)
        path = self._directory / "weights.th"
        if self._is_first:
            weights = self._weights(trainer, is_primary)
            if is_primary:
                torch.save(weights, path)
        else:
            weights = torch.load(path, map_location=trainer.cuda_device, weights_only=False)
            trainer.model.load_state_dict(weights, strict=False)
            self._perturb(trainer.model)
        self._notes["num_dropouts"] = _turn_off_dropout(trainer.model)
        self._notes["averages_over_tokens"] = averages_over_tokens(trainer.model)
        trainer.batch_outputs = partial(self._seed_and_call, trainer.batch_outputs)
        self._record(trainer, is_primary)

    @override
    def on_batch(  # type: ignore[override]
        self,
        trainer: Any,
        batch_inputs: Any,
        batch_outputs: List[Dict[str, Any]],
        *args: Any,
        is_training: bool,
        is_primary: bool = True,
        batch_grad_norm: Any = None,
        **kwargs: Any,
    ) -> None:
        if not is_training:
            return
        losses = [float(outputs["loss"]) for outputs in batch_outputs]
        seconds = time.perf_counter() - self._time
        loss = dist_reduce_sum(sum(losses) / len(losses)) / self._world_size
        norm = float("nan") if batch_grad_norm is None else float(batch_grad_norm)
        if not self._is_first:
            self._notes["unused"] += [
                name
                for name, parameter in trainer.model.named_parameters()
                if parameter.requires_grad
                and parameter.grad is None
                and name not in self._notes["unused"]
            ]
        self._step += 1
        values = {LOSS: torch.tensor([loss]), NORM: torch.tensor([norm])}
        self._record(trainer, is_primary, values, seconds)

    @override
    def on_end(self, trainer: Any, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if is_primary:
            torch.save({**self._notes, "memory": peak_memory()}, self._path("end"))
            # AllenNLP archives the best weights. There are none, because nothing is validated.
            (Path(self.serialization_dir) / "best.th").touch()

    def _batches(self, trainer: Any) -> List[Any]:
        """Returns the batches of this rank: those of the data loader, or those that it recorded."""
        # Each with its number, which is the same in all trainings.
        numbered: List[Tuple[int, Any]] = []
        if self._is_first:
            num_ranks = len(self._ranks)
            # The ranks of a sequence read the same.
            numbers = itertools.count(self._rank * num_ranks // self._world_size, num_ranks)
            count = self._num_batches
            while more := list(itertools.islice(trainer.data_loader, count - len(numbered))):
                numbered += zip(numbers, more)
            torch.save(numbered, self._directory / f"batches_{self._rank}.pt")
        else:
            ranks = self._ranks if self._world_size == 1 else [self._ranks[self._rank]]
            each = [
                torch.load(
                    self._directory / f"batches_{rank}.pt",
                    map_location=trainer.cuda_device,
                    weights_only=False,
                )
                for rank in ranks
            ]
            # Of a step first all micro-batches of a rank, then those of the next.
            size = trainer._num_gradient_accumulation_steps // len(ranks)
            for start in range(0, self._num_batches, size):
                for of_rank in each:
                    numbered += of_rank[start : start + size]
        self._numbers = iter([number for number, _ in numbered])
        return [batch for _, batch in numbered]

    def _weights(self, trainer: Any, is_primary: bool) -> Optional[Dict[str, Any]]:
        """Returns the full fp32 weights on rank 0. Every rank must call it."""
        if self._is_first:
            return full_state_dict(trainer.wrapped_model.shards, keep=is_primary)
        return trainer.model.state_dict() if is_primary else None

    def _perturb(self, model: torch.nn.Module) -> None:
        # The same on each rank.
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if self._noise and parameter.requires_grad:
                factor = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.data *= 1 + self._noise * factor.to(parameter.device)

    def _record(
        self,
        trainer: Any,
        is_primary: bool,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        seconds: float = 0,
    ) -> None:
        """Records the weights after a step. Every rank must call it."""
        weights = self._weights(trainer, is_primary)
        if weights is not None:
            values = {**values, **_sample(weights)}
            torch.save({"values": values, "seconds": seconds}, self._path(self._step))
        self._time = time.perf_counter()

    def _seed_and_call(self, batch_outputs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass in which random layers draw the numbers of its batch."""
        # There are more passes than batches if the trainer divides a batch.
        number = next(self._numbers, -1)
        torch.manual_seed(number)
        before = _random_state()
        outputs = batch_outputs(*args, **kwargs)
        if (after := _random_state()) != before:
            self._notes["draws"][number] = after
        return outputs

    def _path(self, name: Any) -> Path:
        return self._directory / f"{self._run}_{name}.pt"


def _random_state() -> int:
    """Returns a checksum of the states of random number generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return zlib.crc32(torch.cat(states).numpy().tobytes())


def _turn_off_dropout(model: torch.nn.Module) -> int:
    """Sets the probabilities of dropout to 0. Returns the number of modules that had another."""
    count = 0
    for module in model.modules():
        names = [
            name
            for name, value in vars(module).items()
            if ("drop" in name or (name == "p" and isinstance(module, _DropoutNd)))
            and isinstance(value, float)
            and value > 0
        ]
        for name in names:
            setattr(module, name, 0.0)
        count += bool(names)
    return count


def _sample(weights: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """Returns evenly spaced elements of each floating-point tensor."""
    sample = {}
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
            # Odd, so that not all elements are of the same columns of a matrix.
            stride = max(1, tensor.numel() // _NUM_ELEMENTS) | 1
            sample[name] = tensor.detach().reshape(-1)[::stride].to("cpu", torch.float32, copy=True)
    return sample
