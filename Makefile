# One command per job. `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
GRID ?= data/benchmark/grid.toml
JOBS ?= 1
export TQDM_DISABLE ?= $(if $(CI),1,)
export PYTHONHASHSEED := 0
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help
help: ## list what can be done
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "healthrag needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing healthrag and an in-process model runtime into $(VENV) …"
	$(PIP) --editable ".[llama,notebooks]"
	@touch $@

$(VENV)/.report: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing healthrag, papermill and the vector stores into $(VENV) …"
	$(PIP) --editable ".[notebooks,stores]"
	@touch $@

$(VENV)/.record: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing healthrag, the vector stores and an in-process model runtime into $(VENV) …"
	$(PIP) --editable ".[llama,notebooks,stores]"
	@touch $@ $(VENV)/.run $(VENV)/.report

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing healthrag with every extra and the development tools into $(VENV) …"
	$(PIP) --editable ".[all,dev]"
	@touch $@ $(VENV)/.run $(VENV)/.report $(VENV)/.record

.PHONY: env
env: $(VENV)/.dev ## install everything into .venv

.PHONY: bench
bench: $(VENV)/.run ## ask a real model about a real OMOP database, with and without retrieval; ends with a table (about 10 minutes)
	$(BIN)/healthrag sweep --quick --models nearest-example,llama:qwen2.5-coder-0.5b --replies off --threads 2 --out reports/quick

.PHONY: reports
reports: $(VENV)/.report ## re-make every committed table and figure from the recorded replies, with no model
	$(BIN)/healthrag sweep --grid $(GRID) --replies only-read --jobs $(JOBS) --out reports

.PHONY: record
record: $(VENV)/.record ## ask the models what has no recorded reply yet (all of it: some hours on 2 cores)
	HEALTHRAG_REPLIES_DIR=data/replies $(BIN)/healthrag sweep --grid $(GRID) --replies write --jobs $(JOBS) --out reports

.PHONY: sync
sync: $(VENV)/.dev ## export the notebooks to the package and to README.md, count the tasks in their data card
	$(BIN)/nbdev-clean
	$(BIN)/nbdev-export
	$(BIN)/python nbs/readme.py
	$(BIN)/python -c "from healthrag.evaluation.card import write_card; write_card('data/benchmark')"

.PHONY: lint
lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check healthrag tests
	$(BIN)/mypy

.PHONY: test
test: $(VENV)/.dev ## everything that CI checks
	$(MAKE) --no-print-directory lint
	tests/in_sync.sh $(BIN)
	$(BIN)/healthrag models pull llama:smollm2-135m
	HEALTHRAG_REPLIES=only-read $(BIN)/python tests/once_more.py -n 2 --dist loadfile -- tests
	HEALTHRAG_REPLIES=only-read $(BIN)/python tests/once_more.py -p healthrag.nbcheck --nbval -n 2 --dist loadfile -- nbs reports
	HEALTHRAG_REPLIES=only-read $(BIN)/nbdev-test --n-workers 2 || HEALTHRAG_REPLIES=only-read $(BIN)/nbdev-test --n-workers 1

.PHONY: lab
lab: $(VENV)/.dev ## open the notebooks
	$(BIN)/jupyter lab nbs

.PHONY: clean
clean: ## remove what was built, not what was downloaded
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis _proc _docs reports/quick
