"""What log writers are shown of a sharded model: tensors that are gathered when they are used."""

from typing import List

import torch

from allennlp_deepspeed.reports.gathered_tensor import (
    GatheredParameter,
    GatheredTensor,
    GatheredUpdate,
)
from allennlp_deepspeed.reports.log_writers import _View
from allennlp_deepspeed.reports.step_record import StepRecord


class Source:
    """A tensor, and how often it was gathered."""

    def __init__(self, values: List[float]) -> None:
        self.tensor = torch.tensor(values)
        self.times_gathered = 0

    def gather(self) -> torch.Tensor:
        self.times_gathered += 1
        return self.tensor


def test_nothing_is_gathered_before_there_is_something_to_compute() -> None:
    source = Source([1.0, 2.0, 6.0])
    gathered = GatheredTensor(source.gather, (3,))
    assert gathered.shape == (3,) and gathered.numel() == 3 and gathered.dtype == torch.float32
    assert gathered.data is gathered and gathered.detach().cpu() is gathered
    assert source.times_gathered == 0
    assert float(gathered.mean()) == 3.0
    assert float((gathered * 2).sum()) == 18.0
    assert gathered.numpy().tolist() == [1.0, 2.0, 6.0]
    assert source.times_gathered == 3


def test_a_parameter_has_its_gradient_and_the_update_of_its_step() -> None:
    weight, update = Source([1.0, 2.0]), Source([0.25, -0.5])
    gradient = torch.tensor([3.0, 4.0])
    parameter = GatheredParameter(
        weight.gather,
        (2,),
        requires_grad=True,
        gradient=lambda: gradient,
        update=GatheredUpdate(update.gather, (2,)),
    )
    assert parameter.requires_grad and parameter.grad is gradient
    # As AllenNLP finds out how far a step moves it.
    before = parameter.clone()
    assert before.sub_(parameter).tolist() == [0.25, -0.5]
    assert weight.times_gathered == 0


def test_a_record_has_what_the_optimizer_steps_with() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = torch.nn.Parameter(torch.tensor([5.0]))
    optimizer = torch.optim.SGD([weight, unused], lr=0.5)
    record = StepRecord(optimizer)
    for gradients, updates in [(False, False), (True, True), (True, False)]:
        weight.grad = torch.tensor([1.0, 4.0])
        record.start(gradients, updates)
        optimizer.step()
        optimizer.zero_grad()  # as DeepSpeed does
        kept = {id(tensor): values.tolist() for tensor, values in record.gradients.items()}
        assert kept == ({id(weight): [1.0, 4.0]} if gradients else {})
        moved = {id(tensor): values.tolist() for tensor, values in record.updates.items()}
        assert moved == ({id(weight): [0.5, 2.0], id(unused): [0.0]} if updates else {})
        record.clear()
    record.remove_hooks()
    record.start(True, True)
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    assert not record.gradients and not record.updates


def test_a_view_differs_in_what_it_is_given_only() -> None:
    class Trainer:
        steps = 3
        name = "trainer"

    trainer = Trainer()
    view = _View(trainer, steps=4)
    assert (view.steps, view.name) == (4, "trainer")
    view.name = "other"
    assert trainer.name == "other" and trainer.steps == 3
