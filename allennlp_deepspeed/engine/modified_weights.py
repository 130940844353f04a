import re
from contextlib import contextmanager
from typing import Iterable, Iterator, List, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import weights
from allennlp_deepspeed.engine.shards import Shards

Which = Union[str, torch.nn.Parameter, Iterable[Union[str, torch.nn.Parameter]], None]


@contextmanager
def modified_weights(engine: DeepSpeedEngine, which: Which = None) -> Iterator[None]:
    """
    Within it parameters are whole and have the values that the optimizer steps, in fp32, to be
    changed in place. When it ends without an error, what rank 0 has made of them is written to the
    master weights and to the weights that the model computes with. To be entered by every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    which : `Union[str, Parameter, Iterable[Union[str, Parameter]]]`, optional (default = `None`)
        Parameters, or regular expressions that are searched in their names. `None` for all.

    # Raises

    `ConfigurationError`
        If a regular expression is found in no name.
    """
    shards = Shards(engine)
    parameters = list(engine.module.parameters()) if which is None else _chosen(engine, which)
    computed_with = [parameter.data for parameter in parameters]
    with torch.no_grad():
        try:
            for parameter in parameters:
                if not shards.steps_parameters:
                    whole = weights.full_parameter(parameter, shards)
                    dtype = whole.dtype
                    if whole.is_floating_point():
                        dtype = torch.promote_types(dtype, torch.float32)
                    parameter.data = whole.to(engine.device, dtype, copy=True)
            yield
            changed = [parameter.data for parameter in parameters]
        finally:
            for parameter, data in zip(parameters, computed_with):
                parameter.data = data
        for parameter, value in zip(parameters, changed):
            source = value if dist.get_rank() == 0 else None
            whole = weights.broadcast(source, parameter, engine.device)
            weights.set_full_parameter(parameter, whole, shards)
        shards.update_parameters()


def _chosen(
    engine: DeepSpeedEngine,
    which: Union[str, torch.nn.Parameter, Iterable[Union[str, torch.nn.Parameter]]],
) -> List[torch.nn.Parameter]:
    if isinstance(which, (str, torch.nn.Parameter)):
        which = [which]
    chosen = {}
    for name_or_parameter in which:
        found = [
            parameter
            for name, parameter in engine.module.named_parameters()
            if parameter is name_or_parameter
            or (isinstance(name_or_parameter, str) and re.search(name_or_parameter, name))
        ]
        if not found:
            raise ConfigurationError(
                f"'modified_weights' is given {name_or_parameter!r}, which is no parameter of the "
                "model, and in none of their names."
            )
        chosen.update({id(parameter): parameter for parameter in found})
    return list(chosen.values())
