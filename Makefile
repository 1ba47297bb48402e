# Everything a person or a machine does with a checkout. Each step is repeated only when what it was made from changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet
PYTEST_ARGS ?=

.PHONY: help env demo test lint bench lock clean

help: ## Show this list
	@sed -n -E 's/^([a-z]+):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

env: $(VENV)/.installed ## Make .venv with the locked dependencies and Torpor itself

demo: $(VENV)/.installed $(VENV)/.torch-if-small ## Show a real notebook hibernating and waking (about a minute)
	@$(BIN)/torpor setup
	@$(BIN)/torpor demo

test: $(VENV)/.installed $(VENV)/.torch $(VENV)/.nbclient-tests ## Check everything: lint, types, layers, tests
	@requirements/install_browser.sh
	@requirements/install_debian.sh
	@$(BIN)/torpor setup
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed ## Check style, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.installed $(VENV)/.torch ## Run every benchmark
	@$(BIN)/torpor setup
	@for benchmark in benchmarks/[a-z]*.py; do echo "== $$benchmark"; $(BIN)/python "$$benchmark"; done

lock: ## Lock the newest dependencies that pyproject.toml allows (needs uv)
	@requirements/lock.sh

clean: ## Remove the environment and all caches (CRIU and checkpoints stay)
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@requirements/make_venv.sh $(VENV)

$(VENV)/.locked: requirements/dev.txt | $(BIN)/python
	@echo "Installing the locked dependencies"
	@$(PIP) --require-hashes --requirement requirements/dev.txt
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.locked
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.torch: requirements/torch.txt requirements/torch-cuda.txt requirements/install_torch.py $(VENV)/.locked
	@echo "Installing PyTorch"
	@$(BIN)/python requirements/install_torch.py
	@touch $@ $(VENV)/.torch-if-small

$(VENV)/.torch-if-small: requirements/torch.txt requirements/torch-cuda.txt requirements/install_torch.py $(VENV)/.locked
	@echo "Installing PyTorch if it is small here"
	@$(BIN)/python requirements/install_torch.py --if-small
	@touch $@

$(VENV)/.nbclient-tests: requirements/nbclient-tests.txt requirements/install_nbclient_tests.sh $(VENV)/.locked
	@echo "Fetching nbclient's own tests"
	@requirements/install_nbclient_tests.sh $(BIN)/python $(VENV)/nbclient-tests
	@touch $@
