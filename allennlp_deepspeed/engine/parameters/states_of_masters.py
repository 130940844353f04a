"""
Refuses look-ups of optimizer states by the model's parameters, where the optimizer updates shards
or copies of them.
"""

from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Callable, DefaultDict, Dict, Iterator, Tuple

import torch
from typing_extensions import override

from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.shards import Shards


class StatesOfMasters(DefaultDict[Any, Any]):
    """
    The `state` of an optimizer whose keys are master weights. It raises an error where a parameter
    of the model is a key, with which PyTorch's own would find nothing, or add what no step reads.

    # Parameters

    states : `Dict[Any, Any]`, required.
        The states so far.
    names : `Dict[torch.nn.Parameter, str]`, required.
        The names of the parameters to refuse.
    """

    def __init__(self, states: Dict[Any, Any], names: Dict[torch.nn.Parameter, str]) -> None:
        super().__init__(getattr(states, "default_factory", None), states)
        self._names = names
        for key in states:
            self.check(key)

    def check(self, key: Any) -> None:
        """
        # Raises

        `RuntimeError`
            If the key is a parameter of the model.
        """
        name = self._names.get(key)
        if name is not None:
            raise RuntimeError(
                f"`optimizer.state` has no state of the parameter '{name}': the optimizer updates "
                "master weights, which are the keys. To reset the states of all parameters, write "
                "`trainer.optimizer.state.clear()`. To read or change the state of one in place, "
                "write `trainer.optimizer_state(parameter)`, which has the elements of this rank."
            )

    @override
    def __missing__(self, key: Any) -> Any:
        # Not `__getitem__`, which steps call for each master.
        self.check(key)
        return super().__missing__(key)

    @override
    def __reduce__(self) -> Tuple[Any, ...]:
        return defaultdict, (self.default_factory, dict(self))

    @override
    def copy(self) -> Any:
        return defaultdict(self.default_factory, self)

    __copy__ = copy


def _checked(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @wraps(method)
    def call(states: StatesOfMasters, key: Any, *args: Any) -> Any:
        states.check(key)
        return method(states, key, *args)

    return call


for _name in ("__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(StatesOfMasters, _name, _checked(_name))


@contextmanager
def refuse_parameters_as_keys(shards: Shards) -> Iterator[None]:
    """
    Context manager in which the optimizer's `state` is a `StatesOfMasters`, also after it was
    replaced, by loading or by a callback. `state_dict` and `load_state_dict` have the states of
    this rank's masters.

    # Parameters

    shards : `Shards`, required.
        The engine's optimizer must update other tensors than the model's parameters.
    """
    optimizer = shards.engine.basic_optimizer
    names = {parameter: shards.name_of(parameter) for parameter in shards.trained}

    def refuse(*_: Any) -> None:
        if not isinstance(optimizer.state, StatesOfMasters):
            optimizer.state = StatesOfMasters(optimizer.state, names)

    def with_masters(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            refuse()
            with shards.in_param_groups():
                return method(*args, **kwargs)

        return call

    names_of_methods = ("state_dict", "load_state_dict")
    methods = {name: with_masters(getattr(optimizer, name)) for name in names_of_methods}
    with ExitStack() as undo:
        undo.callback(optimizer.register_step_pre_hook(refuse).remove)
        undo.callback(optimizer.register_load_state_dict_post_hook(refuse).remove)
        undo.enter_context(internals.replace_attributes(optimizer, **methods))
        refuse()
        try:
            yield
        finally:
            optimizer.state = optimizer.state.copy()
