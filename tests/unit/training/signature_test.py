"""The signatures that editors and `FromParams` read name every key, with its declared default."""

import inspect
from typing import Any, Callable, Dict

import pytest
from allennlp.training import Checkpointer, GradientDescentTrainer

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.config.declared_keys import CHECKPOINTER_KEYS, TRAINER_KEYS
from allennlp_deepspeed.config.key_validation import Key

# Objects, which a config file and Python give in different ways.
OBJECTS = {"checkpointer", "deepspeed_config", "optimizer"}


def parameters_of(function: Callable[..., Any]) -> Dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters


def assert_declared(function: Callable[..., Any], keys: Dict[str, Key]) -> None:
    parameters = parameters_of(function)
    for name, key in keys.items():
        assert name in parameters
        assert name in OBJECTS or parameters[name].default == key.default, name


def test_the_trainer_has_each_key_as_declared() -> None:
    assert_declared(DeepSpeedTrainer.__init__, TRAINER_KEYS)
    assert_declared(DeepSpeedTrainer.from_partial_objects, TRAINER_KEYS)


def test_the_checkpointer_has_each_key_as_declared() -> None:
    assert_declared(DeepSpeedCheckpointer.__init__, CHECKPOINTER_KEYS)


def test_a_config_file_and_python_have_the_same_parameters() -> None:
    constructors = (DeepSpeedTrainer.__init__, DeepSpeedTrainer.from_partial_objects)
    in_python, in_files = map(parameters_of, constructors)
    assert in_files.pop("kwargs").kind is inspect.Parameter.VAR_KEYWORD  # those of a subclass
    assert in_python.keys() == in_files.keys()
    assert not any(p.kind is p.VAR_KEYWORD for p in in_python.values())


@pytest.mark.parametrize(
    "own, of_allennlp",
    [
        (DeepSpeedTrainer.__init__, GradientDescentTrainer.__init__),
        (DeepSpeedTrainer.from_partial_objects, GradientDescentTrainer.from_partial_objects),
        (DeepSpeedCheckpointer.__init__, Checkpointer.__init__),
    ],
)
def test_positional_arguments_are_those_of_allennlp(own: Any, of_allennlp: Any) -> None:
    names = [n for n in parameters_of(of_allennlp) if n not in ("kwargs", "ddp_wrapped_model")]
    assert list(parameters_of(own))[: len(names)] == names


def test_every_argument_of_allennlp_is_there() -> None:
    of_allennlp = parameters_of(GradientDescentTrainer.from_partial_objects)
    of_allennlp.pop("kwargs")
    parameters = parameters_of(DeepSpeedTrainer.from_partial_objects)
    for name, parameter in of_allennlp.items():
        assert name in parameters
        if name not in OBJECTS and name not in TRAINER_KEYS:
            assert parameters[name].default == parameter.default, name
