# Each target makes the environment that it needs in .venv: `demo` only what runs, the others what tests too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
RUNTIME := $(VENV)/.runtime
TESTING := $(VENV)/.testing
PACKAGES := shared services tests

.PHONY: demo test full check coverage bench supervisor wheel format clean

demo: $(RUNTIME)
	@$(BIN)/paddock demo

test: $(TESTING)
	@$(BIN)/python -m pytest

full: $(TESTING)
	@PADDOCK_FULL=1 $(BIN)/python -m pytest

check: $(TESTING)
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "Some files are not formatted: make format"; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -q tests/test_behaviours.py

coverage: $(TESTING)
	@$(BIN)/python -m pytest -q tests/bridge tests/shared --cov --cov-report=term

bench: $(TESTING)
	@$(BIN)/python -m tests.bench

# Static programs for both architectures beside the sources; a wheel that is built afterwards ships them.
supervisor: $(RUNTIME)
	@$(INSTALL) --editable '.[supervisor]'
	@$(BIN)/python -m shared.supervisor.build

wheel: $(TESTING)
	@rm -rf build
	@$(BIN)/python -m build --wheel

format: $(TESTING)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .paddock *.egg-info
	@rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing paddock into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(TESTING): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing paddock and its test tools into $(VENV)"
	@$(INSTALL) --editable '.[test]'
	@touch $@ $(RUNTIME)
