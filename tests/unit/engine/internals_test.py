import ast
from pathlib import Path

import pytest

import allennlp_deepspeed
from allennlp_deepspeed.engine import internals

PACKAGE = Path(allennlp_deepspeed.__file__).parent


def test_an_attribute_that_deepspeed_has_renamed_is_an_error_and_is_not_created() -> None:
    class Engine:
        pass

    engine = Engine()
    with pytest.raises(
        RuntimeError, match="has no 'Engine.enable_backward_allreduce'.* supports 0.19"
    ):
        internals.disable_gradient_hooks(engine, has_zero_optimizer=False)
    with (
        pytest.raises(RuntimeError, match="has no 'Engine.step'"),
        internals.replace_attributes(engine, step=1),
    ):
        pass
    assert vars(engine) == {}


def test_private_attributes_of_deepspeed_stand_in_one_module() -> None:
    internal = Path(internals.__file__)
    strings = {
        node.value
        for node in ast.walk(ast.parse(internal.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    private = {name for name in strings if name.startswith("_") and name.isidentifier()}
    private.discard("_exit")  # which `os` has, too
    assert {"_coalesce_grad_reduction", "_hp_mapping", "_zero_init_param"} <= private
    for path in PACKAGE.rglob("*.py"):
        if path == internal:
            continue
        read = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert not read & private, f"{path.name} reads {read & private}"
