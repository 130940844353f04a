"""
Resumes a training of AllenNLP's own trainer that an environment of 2022 has begun.

Works around AllenNLP 2.10.1: its optimizer's state goes to parameters by their position, and the
order of parameters has changed in RoBERTa's kin and others since transformers 4. Its training state
can also have NumPy's scalars under their former name, which PyTorch 2.6 doesn't load. Gone when a
training of RoBERTa that was interrupted in 2022 continues with `--recover` as it would have then.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import numpy as np
import torch
from allennlp.common.checks import ConfigurationError

StateDict = Dict[str, Any]


def by_name(restore: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps `GradientDescentTrainer._maybe_restore_checkpoint`."""

    @functools.wraps(restore)
    def restore_by_name(self: Any) -> None:
        if self._checkpointer is None:
            restore(self)
            return
        with torch.serialization.safe_globals(_numpy_scalars()):
            state = self._checkpointer.load_checkpoint()
        # A sharded model's state has other names.
        if state is not None and not getattr(self._ddp_wrapped_model, "is_sharded", False):
            model_state, training_state = state
            optimizer = _state_by_name(
                self.optimizer, training_state["optimizer"], self._pytorch_model, model_state
            )
            state = model_state, {**training_state, "optimizer": optimizer}
        with mock.patch.object(self._checkpointer, "load_checkpoint", lambda: state):
            restore(self)

    return restore_by_name


def _numpy_scalars() -> List[Any]:
    reconstruct, _ = np.float64(0).__reduce__()
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    former: Tuple[Any, str] = (reconstruct, "numpy.core.multiarray.scalar")
    # The context would remove at its end what others have added.
    others = torch.serialization.get_safe_globals()
    return [each for each in (reconstruct, former, np.dtype, *dtypes) if each not in others]


def _state_by_name(
    optimizer: Any, state: StateDict, model: torch.nn.Module, model_state: StateDict
) -> StateDict:
    """
    Returns the state of an optimizer in today's order of parameters. Then it was the order of their
    names in the model's state.
    """
    if "param_groups" not in state:
        # Of "multi", or of an optimizer with a state of its own.
        parts = {
            f"{name}_optimizer": part for name, part in getattr(optimizer, "optimizers", {}).items()
        }
        return {
            key: _state_by_name(parts[key], part, model, model_state) if key in parts else part
            for key, part in state.items()
        }
    positions = {name: position for position, name in enumerate(model_state)}
    names: Dict[Any, str] = {}
    former: Dict[Any, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
        if name in positions:
            former[parameter] = min(positions[name], former.get(parameter, positions[name]))
    order = [former.get(parameter) for parameter in names]
    if None in order or order == sorted(order):  # type: ignore[type-var]
        return state  # the order is the same, whatever the optimizer makes of it
    groups = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"]):
        parameters = group["params"]
        unknown = [names[parameter] for parameter in parameters if parameter not in former]
        if unknown or len(parameters) != len(saved["params"]):
            raise _other_parameters(unknown)
        ids = dict(zip(sorted(parameters, key=former.__getitem__), saved["params"]))
        for parameter, index in ids.items():
            _check_shapes(names[parameter], parameter, state["state"].get(index, {}))
        groups.append({**saved, "params": [ids[parameter] for parameter in parameters]})
    if len(groups) != len(state["param_groups"]):
        raise _other_parameters([])
    return {**state, "param_groups": groups}


# The entries that have the shape of their parameter, in PyTorch's optimizers.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "acc_delta")


def _check_shapes(name: str, parameter: torch.Tensor, state: StateDict) -> None:
    shapes = [state[key].shape for key in _LIKE_PARAMETER if torch.is_tensor(state.get(key))]
    if any(shape != parameter.shape for shape in shapes):
        raise _other_parameters([name])


def _other_parameters(names: List[str]) -> ConfigurationError:
    which = f" ('{names[0]}')" if names else ""
    return ConfigurationError(
        "The state of the optimizer in the checkpoint is of other parameters than the model "
        f"has{which}: the training can't be resumed. Archive the weights of the checkpoint with "
        "allennlp.models.archive_model(serialization_dir, 'model_state_e…_b….th'), and start from "
        'them in another directory with "model": {"type": "from_archive", ...} and "vocabulary": '
        '{"type": "from_files", ...}.'
    )
