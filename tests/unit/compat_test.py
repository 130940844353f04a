"""What AllenNLP does on today's libraries, in the package's place of it."""

import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
from allennlp.common import util
from allennlp.common.plugins import import_module_and_submodules as held_by_commands

from allennlp_deepspeed.compat import import_module_and_submodules


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of some modules, in the working directory."""
    name = f"package_of_{tmp_path.name}"
    for path in (
        "__init__.py",
        "module.py",
        "_private.py",
        "test_of_module.py",
        "excluded.py",
        "inner/__init__.py",
        "inner/another.py",
    ):
        (tmp_path / name / path).parent.mkdir(exist_ok=True)
        (tmp_path / name / path).touch()
    monkeypatch.chdir(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize("function", [import_module_and_submodules, held_by_commands])
def test_all_public_modules_of_a_package_are_imported(package: str, function):
    assert util.import_module_and_submodules is import_module_and_submodules
    before = list(sys.path)
    with mock.patch.object(importlib, "invalidate_caches") as invalidate_caches:
        function(package, exclude={f"{package}.excluded"})
    imported = {module for module in sys.modules if module.startswith(package)}
    assert imported == {
        package,
        *(f"{package}.{module}" for module in ("module", "inner", "inner.another")),
    }
    assert sys.path == before
    if function is import_module_and_submodules:
        assert invalidate_caches.call_count == 1


def test_a_module_that_is_no_package_is_imported(package: str):
    import_module_and_submodules(f"{package}.inner.another")
    assert f"{package}.inner.another" in sys.modules
    assert f"{package}.module" not in sys.modules
