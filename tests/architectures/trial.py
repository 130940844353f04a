"""Trains a shrunken model in a plain loop of transformers, and with ZeRO."""

import copy
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary

from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.architectures.shrunken import VOCABULARY_SIZE, shrunken
from tests.support.side_by_side import Batch, Side
from tests.support.workers import run_workers

LEARNING_RATE = 0.01
NUM_STEPS = 3

# Of the largest change that training makes to a weight.
TOLERANCE = 1e-3


class Outcome(NamedTuple):
    """
    # Parameters

    model_type : `str`
    class_name : `str`, optional (default = `""`)
    num_parameters : `int`, optional (default = `0`)
    difference : `float`, optional (default = `None`)
        The largest of a tensor, of the largest change that training makes to one.
    refusal : `str`, optional (default = `""`)
        The message, if it was refused.
    cause : `str`, optional (default = `""`)
        Why transformers alone don't train it, if they don't.
    failure : `str`, optional (default = `""`)
        What became of it otherwise.
    own_loss_is_of : `str`, optional (default = `""`)
        Why the plain loop is not over the model's own loss, if it isn't.
    """

    model_type: str
    class_name: str = ""
    num_parameters: int = 0
    difference: Optional[float] = None
    refusal: str = ""
    cause: str = ""
    failure: str = ""
    own_loss_is_of: str = ""


def batches() -> List[Batch]:
    """Of several lengths, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(NUM_STEPS):
        ids = torch.randint(4, VOCABULARY_SIZE - 2, (3, 18), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 11:] = mask[2, 7:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return made


def constructed(model_type: str) -> CausalLM:
    torch.manual_seed(7)
    model = CausalLM(Vocabulary(), config=shrunken(model_type), loss_chunk_size=8)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def try_type(model_type: str, stages: List[int]) -> Outcome:
    (plain,) = run_workers(1, lambda rank: _in_plain_loop(model_type))
    if plain is None:
        return Outcome(model_type, failure="ends the process")
    outcome, initial, expected = plain
    if expected is None:
        return outcome
    largest = 0.0
    for stage in stages:
        try:
            actual = Side(
                lambda: constructed(model_type),
                lambda rank: batches(),
                stage,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
                num_epochs=1,
            ).train()
        except Exception as error:  # of any kind
            return outcome._replace(failure=f"stage {stage}: {_in_short(error)}")
        largest = max(largest, difference(initial, expected, actual))
    if largest > TOLERANCE:
        return outcome._replace(failure=f"differs by {largest:.2g} of the change")
    return outcome._replace(difference=largest)


def _in_plain_loop(model_type: str) -> Any:
    """An outcome, and as arrays the weights before and after a plain loop."""
    outcome = Outcome(model_type)
    try:
        model = constructed(model_type)
    except ConfigurationError as error:
        if error.__cause__ is not None:  # transformers can't construct it
            return outcome._replace(cause=_in_short(error.__cause__)), None, None
        return outcome._replace(refusal=_in_short(error)), None, None
    except Exception as error:  # of any kind
        return outcome._replace(cause=_in_short(error)), None, None
    outcome = outcome._replace(
        class_name=type(model.transformer).__name__,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )
    initial = _arrays(model.transformer)
    trained: Any = copy.deepcopy(model.transformer)
    try:
        optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
        for batch in batches():
            optimizer.zero_grad()
            loss, own_loss_is_of = plain_loss(trained(**batch, use_cache=False), batch)
            loss.backward()
            optimizer.step()
        outcome = outcome._replace(own_loss_is_of=own_loss_is_of)
    except Exception as error:  # of any kind
        return outcome._replace(cause=_in_short(error)), None, None
    try:
        model(**batches()[0])
    except ConfigurationError as error:
        return outcome._replace(refusal=_in_short(error)), None, None
    except Exception as error:  # of any kind
        return outcome._replace(failure=_in_short(error)), None, None
    return outcome, initial, _arrays(trained)


def plain_loss(outputs: Any, batch: Batch) -> Tuple[torch.Tensor, str]:
    """
    Returns the loss of the next tokens, and what the model's own loss is of, if of something else:
    those of some decoders are of labels that have been shifted before.
    """
    logits, labels = outputs.logits.flatten(0, 1), batch["labels"]
    next_tokens = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = torch.nn.functional.cross_entropy(logits, next_tokens.flatten())
    if torch.allclose(outputs.loss, loss, rtol=1e-5):
        return outputs.loss, ""
    at_once = torch.nn.functional.cross_entropy(logits, labels.flatten())
    is_shifted = torch.allclose(outputs.loss, at_once, rtol=1e-5)
    return loss, "labels that are shifted before" if is_shifted else "something else besides"


def _arrays(module: torch.nn.Module) -> Dict[str, Any]:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def difference(
    initial: Dict[str, Any], expected: Dict[str, Any], actual: Dict[str, torch.Tensor]
) -> float:
    """The largest of a tensor, of the largest change that training makes to one."""
    change = max(float(abs(expected[name] - initial[name]).max()) for name in expected)
    assert change > 1e-5, "Nothing has been trained."
    return max(
        float(abs(actual[f"transformer.{name}"].numpy() - value).max()) / change
        for name, value in expected.items()
    )


def _in_short(error: BaseException) -> str:
    message = error.message if isinstance(error, ConfigurationError) else str(error)
    kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(message.split())}"[:250]
