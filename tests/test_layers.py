"""Imports go one way, Ray stays in `runtime`, and what actors load is free of torch (laws 6 to 8 depend on it)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "megascale_lightning"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

LAYERS = (
    {"errors", "version", "writing"},
    {"types"},
    {"places", "sources", "rows"},
    {"config", "curriculum", "mixtures", "streams"},
    {"planning", "loading", "constructing", "scaling", "checkpointing"},
    {"runtime"},
    {"client"},
    {"integrations", "reporting", "cli", "simulation"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Third party -> the parts that may import it at all, and those that may only inside a function.
CONFINED = {
    "ray": ({"runtime"}, set()),
    "torch": ({"client", "integrations"}, {"cli"}),
    "lightning": ({"client", "integrations"}, {"cli"}),
    "accelerate": ({"client", "integrations"}, {"cli"}),
    "transformers": ({"client", "integrations"}, {"cli"}),
}

ACTOR_PARTS = [name for names in LAYERS[:6] for name in sorted(names)]


@dataclass(frozen=True)
class Import:
    module: str  # that imports
    target: str  # that is imported, as far as it is written
    names: tuple[str, ...]
    in_function: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import that runs; those under `if TYPE_CHECKING` do not."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            negated = isinstance(node.test, ast.UnaryOp)
            for child in node.body if negated else node.orelse:
                yield from visit(child, in_function)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, (), in_function, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            names = tuple(alias.name for alias in node.names)
            yield Import(module, node.module or "", names, in_function, node.lineno)
        inner = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(ast.parse(source), in_function=False)


def all_imports() -> list[Import]:
    return [found for name, path in modules().items() for found in imports_of(name, path.read_text("utf-8"))]


def part_of(module: str) -> str:
    """`megascale_lightning.planning.packing` -> `planning`; the package itself -> ""."""
    return module.split(".")[1] if "." in module else ""


def targets_of(found: Import) -> list[str]:
    """Modules of ours that an import reaches; `from megascale_lightning import x` reaches x."""
    if found.target == PACKAGE:
        return [f"{PACKAGE}.{name}" for name in found.names if name in LEVEL] or [PACKAGE]
    return [found.target] if found.target.startswith(f"{PACKAGE}.") else []


def order_faults(imports: list[Import]) -> list[str]:
    known = modules()
    faults = []
    for found in imports:
        mine = part_of(found.module)
        for target in targets_of(found):
            theirs = part_of(target)
            if mine in ("", theirs):
                continue  # the package itself offers names of every part; a part may use itself
            if theirs == "":
                if mine not in LAYERS[-1]:
                    faults.append(f"{found}: the package's own names are for its users, name the module")
            elif LEVEL[theirs] > LEVEL[mine]:
                faults.append(f"{found}: {theirs} lies above {mine}")
            elif LEVEL[theirs] == LEVEL[mine] and mine not in LAYERS[-1]:
                inner = [target] + [f"{target}.{name}" for name in found.names if f"{target}.{name}" in known]
                if any(name.count(".") > 1 for name in inner):
                    faults.append(f"{found}: {mine} may use what {theirs} offers, not its inner modules")
    return faults


def confinement_faults(imports: list[Import]) -> list[str]:
    faults = []
    for found in imports:
        allowed, lazily = CONFINED.get(found.target.split(".")[0], (None, None))
        mine = part_of(found.module)
        if allowed is None or mine in allowed or (mine in lazily and found.in_function):
            continue
        faults.append(f"{found}: only {sorted(allowed)} may" + (f", {sorted(lazily)} in functions" if lazily else ""))
    return faults


def test_every_part_has_a_layer():
    parts = {part_of(module) for module in modules()} - {""}
    assert parts <= set(LEVEL), f"without a layer: {sorted(parts - set(LEVEL))}"


def test_imports_go_one_way():
    assert not order_faults(all_imports())


def test_heavy_libraries_stay_where_they_belong():
    assert not confinement_faults(all_imports())


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("types", "from megascale_lightning.config import LoaderConfig", "config lies above types"),
        ("sources.source", "import megascale_lightning.planning.planner", "planning lies above sources"),
        ("runtime.local", "from megascale_lightning import client", "client lies above runtime"),
        ("planning.planner", "from megascale_lightning.loading.buffer import B", "not its inner modules"),
        ("planning.planner", "def f():\n    from megascale_lightning.client import x", "client lies above planning"),
        ("loading.loader", "from megascale_lightning import LoaderConfig", "name the module"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str, fault: str):
    (found,) = order_faults(list(imports_of(f"{PACKAGE}.{module}", source)))
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source", "num_faults"),
    [
        ("client.loader", "import ray", 1),
        ("runtime.ray", "import ray.util", 0),
        ("runtime.ray", "def f():\n    import torch", 1),
        ("sources.dataset", "from torch.utils.data import Dataset", 1),
        ("sources.dataset", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
        ("cli.state", "import torch", 1),
        ("cli.state", "def f():\n    import torch", 0),
        ("client.finish", "import torch", 0),
    ],
)
def test_a_misplaced_library_is_found(module: str, source: str, num_faults: int):
    assert len(confinement_faults(list(imports_of(f"{PACKAGE}.{module}", source)))) == num_faults


def loaded_after(modules_to_import: list[str]) -> set[str]:
    """The top-level modules of a fresh interpreter that has imported some of ours."""
    code = (
        "import sys\nfor name in sys.argv[1:]: __import__(name)\nprint(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules_to_import],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_below(*parts: str) -> list[str]:
    return [name for name in modules() if part_of(name) in parts]


def test_importing_the_package_is_cheap():
    assert not loaded_after([PACKAGE]) & {*CONFINED, "pyarrow", "pandas", "datasets"}


def test_actors_load_no_trainer():
    """Law 8: each of these would cost an actor some hundred MB."""
    heavy = {*CONFINED, "datasets", "pandas"} - {"ray"}
    assert not loaded_after(modules_below(*ACTOR_PARTS)) & heavy


def test_roles_do_not_know_ray():
    parts = [name for name in ACTOR_PARTS if name != "runtime"]
    assert "ray" not in loaded_after(modules_below(*parts))
