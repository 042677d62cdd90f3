"""What the package offers: every name is there, sorted, documented, and seen by type checkers."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import megascale_lightning

README = Path(__file__).resolve().parent.parent / "README.md"
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(megascale_lightning.__path__, f"{megascale_lightning.__name__}.")
    if "__main__" not in module.name
)


@pytest.mark.parametrize("name", megascale_lightning.__all__)
def test_public_names_are_there_and_documented(name: str):
    value = getattr(megascale_lightning, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__name__ == name


def test_public_names_are_sorted():
    names = megascale_lightning.__all__
    assert names == sorted(set(names), key=lambda name: (not name[0].isupper(), name))


def test_type_checkers_see_the_lazy_names():
    tree = ast.parse(Path(megascale_lightning.__file__).read_text("utf-8"))
    guarded = {
        alias.name: (node.module or "").removeprefix("megascale_lightning.")
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert guarded == dict(megascale_lightning._LAZY)


def test_errors_are_all_public():
    from megascale_lightning import errors

    assert set(errors.__all__) <= set(megascale_lightning.__all__)


def test_dir_lists_the_lazy_names():
    assert set(megascale_lightning.__all__) <= set(dir(megascale_lightning))


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'MegaScaleLoder'"):
        megascale_lightning.MegaScaleLoder  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_for(name: str):
    module = importlib.import_module(name)
    assert inspect.getdoc(module), f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"


def test_the_readme_shows_names_that_exist():
    text = README.read_text("utf-8")
    shown = {
        alias.name
        for block in text.split("```python")[1:]
        for node in ast.walk(ast.parse(block.split("```")[0]))
        if isinstance(node, ast.ImportFrom) and node.module == "megascale_lightning"
        for alias in node.names
    }
    assert shown
    assert shown <= set(megascale_lightning.__all__)
