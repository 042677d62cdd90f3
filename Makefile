# make demo    trains a small model on real text through the loader, stops, resumes (first run: installs into .venv)
# make test    the test suite, without what takes long (.ci/run runs that, too)
# make check   format, lint, types, layers
# make clean   removes .venv and caches
#
# PYTHON  the interpreter that .venv is made from (3.10 or newer)
# TORCH   arguments for pip that choose a build of torch before anything else is installed
# ARGS    further arguments of the demo or of pytest

PYTHON ?= python3
TORCH ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A shell that forgot to leave another environment must not lend its packages to this one.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help demo test check format clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install $(TORCH))
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python examples/lightning_text.py $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_public_api.py tests/test_project.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
