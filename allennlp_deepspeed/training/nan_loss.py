import math
from typing import Any, List, Optional

from allennlp_deepspeed.engine.optimizers.deepspeed_optimizers import highest_learning_rate
from allennlp_deepspeed.engine.process import collectives


def describe_nan_loss(
    trainer: Any, epoch: int, steps_since_nan: int, own_steps_since_nan: int, own_terms: List[str]
) -> str:
    """
    Describes the step in which the loss was first NaN, what to try, and how to resume. Every rank
    must call it.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    epoch : `int`, required.
    steps_since_nan : `int`, required.
        The number of steps from the first with a NaN loss on any rank to now.
    own_steps_since_nan : `int`, required.
        The same of this rank, 0 if it has no NaN.
    own_terms : `List[str]`, required.
        The names of this rank's terms of the loss that were NaN.
    """
    of_ranks = collectives.all_gather_object((own_steps_since_nan, own_terms))
    places = [
        (f"rank {rank}", terms)
        for rank, (steps, terms) in enumerate(of_ranks)
        if steps == steps_since_nan
    ]
    terms = sorted({term for _, of_rank in places for term in of_rank})
    where = f" on {', '.join(rank for rank, _ in places)}" if len(of_ranks) > 1 else ""
    which = f" ({', '.join(terms)})" if terms else ""
    progress = trainer.progress
    step = progress.total_batches_completed - steps_since_nan + 1
    step_of_epoch = progress.batches_in_epoch_completed - steps_since_nan + 1
    sentences = [
        f"nan loss encountered at step {step_of_epoch} of epoch {epoch + 1} (global step {step}): "
        f"the training loss is NaN{where}{which}.",
        _advice(trainer, step),
        _how_to_resume(trainer),
    ]
    return " ".join(sentences)


def describe_nan_validation(validation_loss: float, epoch: int) -> Optional[str]:
    """
    Describes a validation loss that is NaN on some rank, `None` if it isn't. Every rank must call
    it.

    # Parameters

    validation_loss : `float`, required.
        The sum of the losses of this rank's batches.
    epoch : `int`, required.
    """
    are_nan = collectives.all_gather_object(math.isnan(validation_loss))
    ranks = [f"rank {rank}" for rank, is_nan in enumerate(are_nan) if is_nan]
    if not ranks:
        return None
    where = f" on {', '.join(ranks)}" if len(are_nan) > 1 else ""
    return (
        f"The validation loss of epoch {epoch + 1} is NaN{where}. Training continues, as in "
        "AllenNLP, but no epoch is better than one with NaN if 'trainer.validation_metric' is "
        '"-loss". Look for a division by 0 or a logarithm of 0 in the model, and for a batch '
        "without labels."
    )


def _advice(trainer: Any, step: int) -> str:
    if step == 1:
        return (
            "In the first step the data or the model are the cause: a division by 0, the logarithm "
            "of 0, a batch without labels, or a value in the data that is NaN."
        )
    config = trainer.resolved_config
    rate = highest_learning_rate(trainer.optimizer)
    tries = [f"a lower learning rate{'' if rate is None else f' (it is {rate:g})'}"]
    if not config.engine_config.get("gradient_clipping"):
        tries.append("\"grad_norm\": 1.0 in 'trainer'")
    if config.precision == "fp16":
        tries.append('"bf16" instead of "fp16"')
    return (
        f"Try {' or '.join(tries)}, and look for a division by 0 or a logarithm of 0 in the model."
    )


def _how_to_resume(trainer: Any) -> str:
    name = trainer.checkpointer and trainer.checkpointer.last_saved
    if not name:
        return "There is no checkpoint to resume from."
    return (
        f"{name} has no NaN: --recover continues from it with the same settings, as after a "
        "correction of the model. With other settings, train into another directory."
    )
