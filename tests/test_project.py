"""The project's own files: what is installed, what is kept out, what the documents promise."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megascale_lightning

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
CORE = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}


def test_malicious_releases_are_excluded():
    """2.6.2 and 2.6.3 of `lightning` stole credentials when imported."""
    allowed = CORE["lightning"].specifier
    assert [v for v in ("2.6.0", "2.6.1", "2.6.2", "2.6.3", "2.6.4", "2.7.0") if v in allowed] == [
        "2.6.1",
        "2.6.4",
        "2.7.0",
    ]
    for extra, texts in PROJECT["optional-dependencies"].items():
        names = {Requirement(text).name for text in texts}
        assert not names & {"lightning", "pytorch-lightning"}, f"extra {extra} could loosen the bound"


def test_core_dependencies_are_the_few_that_are_meant():
    assert set(CORE) == {"fsspec", "lightning", "numpy", "packaging", "pyarrow", "pyyaml", "ray", "torch"}


def test_no_dependency_is_pinned():
    """An exact version of torch or numpy would break the environment of whoever installs this beside other packages."""
    texts = [*PROJECT["dependencies"], *(t for ts in PROJECT["optional-dependencies"].values() for t in ts)]
    assert not [text for text in texts if re.search(r"==|===|~=", text.partition(";")[0])]


def test_extras():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"accelerate", "all", "bench", "calibration", "cli", "dev", "hf", "http", "images", "video"}
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all", "dev"}


def test_console_script_is_there():
    module, _, name = PROJECT["scripts"]["megascale"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", megascale_lightning.__version__)


def test_package_is_typed_and_complete():
    package = ROOT / "megascale_lightning"
    assert (package / "py.typed").is_file()
    folders = {path.parent for path in package.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_warnings_are_errors():
    options = PYPROJECT["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"][0] == "error"
    assert options["xfail_strict"]
    assert PYPROJECT["tool"]["mypy"]["strict"]


def test_licence_is_complete():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_changelog_has_an_unreleased_section():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_documents_lead_somewhere(name: str):
    document = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (document.parent / target).exists()]


def test_tests_that_the_guarantees_name_exist():
    """A law without its test is a wish."""
    text = (ROOT / "docs/guarantees.md").read_text("utf-8")
    named = set(re.findall(r"`(tests/[^`:]+)((?:::\w+)*)`", text))
    assert text.count("`tests/") == len(re.findall(r"`tests/[\w/]+\.py(?:::\w+)*`", text)), "a name is not understood"
    missing = []
    for path, names in sorted(named):
        file = ROOT / path
        there = file.read_text("utf-8") if file.is_file() else None
        lost = [n for n in names.split("::")[1:] if not re.search(rf"\b(def|class) {n}\b", there or "")]
        if there is None or lost:
            missing.append(f"{path}{names}")
    assert named
    assert not missing


def test_ci_runs_what_make_check_runs():
    ci, make = (ROOT / ".ci/run").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    for step in ("ruff", "format --check .", "check .", "mypy", "pytest"):
        assert step in ci
        assert step in make
