# The front door. `make test` and `make demo` work on a machine that has only Python 3.11 and make.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test lint demo bench lock clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## create .venv and install the locked versions (a second call does nothing)

# torch comes first and pinned: a later, unpinned request for it would replace it with another build.
$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "need Python 3.11: '$(PYTHON)' not found; run 'make PYTHON=/path/to/python3.11 ...'"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint  ## lint, type check, then every test on two processes
	$(BIN)/pytest -n 2

demo: setup  ## what a real training schedule does, before it runs
	$(BIN)/equilibria plan --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9 --schedule step \
	  --milestones 60,120,160 --factor 0.2 --epochs 200 --steps-per-epoch 391

bench: setup  ## the speed figures, measured side by side (keep the machine idle)
	$(BIN)/python benchmarks/run.py

lock: setup  ## write requirements.lock from what is installed
	$(BIN)/python -m pip freeze --exclude-editable | grep -v '^-e' | sed 's/+cpu$$//' > requirements.lock

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
