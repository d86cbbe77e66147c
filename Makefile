# Two commands: `make demo` and `make test`. The environment goes to .venv, or to $VENV.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3.11
PY := $(VENV)/bin/python
STAMP := $(VENV)/.sglang-ext-installed
ARGS ?=
TIERS ?= tests
JOBS ?= 2
# A file stays in one process: its tests share servers.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile

.PHONY: help venv demo test test-matrix test-unit lint bench clean

help:
	@echo "make demo [ARGS=--once]   serve the built-in model with DSPARK and talk to it"
	@echo "make test [TIERS=tests/unit] [JOBS=2]  lint, types and tests, in JOBS processes"
	@echo "make test-matrix          every parallel layout with every algorithm (hours on two cores)"
	@echo "make lint                 ruff and mypy"
	@echo "make bench [ARGS=...]     speed of the built-in model with both drafts, to bench.md"
	@echo "VENV=/path/to/venv keeps the environment elsewhere."

$(STAMP): pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "No virtual environment: apt-get install python3-venv (or $(PYTHON)-venv)"; exit 1; }
	$(PY) -m pip install --quiet --upgrade pip setuptools
	$(PY) -m pip install --editable '.[dev,plots]'
	@touch $@

venv: $(STAMP)

demo: venv
	$(VENV)/bin/sglang-ext demo run $(ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: lint
	$(PYTEST) $(TIERS)

test-matrix: venv
	SGLANG_EXT_TEST_MATRIX=1 $(PY) -m pytest tests/e2e/test_layouts.py

test-unit: venv
	$(PYTEST) tests/unit

bench: venv
	$(VENV)/bin/sglang-ext bench --markdown bench.md $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
