# The front door. `make test` and `make demo` work on a machine that has only Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
# Python keeps the bytecode of what it imports, also in a container that says not to: otherwise each of the tests'
# processes compiles all of torch again, which takes longer than most tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup test test-all lint demo reproduce reproduce-networks torture bench bench-peers docs docs-figures docs-generated lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 11

setup: $(STAMP)  ## create .venv and install the locked versions (a second call does nothing)

# torch comes first and pinned: a later, unpinned request for it would bring in another build.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null || \
	  { echo "need Python 3.11 or newer: '$(PYTHON)' is not; run 'make PYTHON=/path/to/python3.11 ...'"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) "$$(grep '^torch==' $<)"
	$(PIP) --no-deps -r $<
	$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q src  # the first start is as fast as the second
	@touch $@
endef

$(STAMP): requirements.lock pyproject.toml Makefile
	$(install)

$(DEMO_STAMP): requirements-demo.lock pyproject.toml Makefile
	$(install)

lint: setup  ## ruff, mypy, and the workflows' linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline .github

# One thread each: the processes have the cores. Each begins with half of the files, so that few fixtures are made twice.
# What is left out repeats at length what quicker tests check. Lint and types are checked beside the tests, not before:
# mypy would leave a core idle for a minute.
test: setup  ## the tests on two processes, with lint and type check beside them (some minutes)
	@mkdir -p build; $(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"; tested=$$?; \
	wait $$lint && echo "lint and types: ok" || { cat build/lint.log; exit 1; }; exit $$tested

test-all: setup lint  ## the same with the slow tests, and more examples of each property
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile=thorough

# What the demo needs is a fifth of what development needs; it is there already where that is installed.
demo: $(if $(wildcard $(STAMP)),setup,$(DEMO_STAMP))  ## train a small network for about a minute, watched, and write a report
	$(BIN)/equilibria demo

reproduce: setup  ## run the papers' synthetic experiments again, into results/ (what is there already is kept)
	$(BIN)/equilibria reproduce synthetic --scale desk

reproduce-networks: setup  ## the same for their trained networks: hours, and most need CIFAR-10
	$(BIN)/equilibria reproduce networks --scale desk

torture: setup  ## attack every promise for a quarter of an hour, and write docs/reliability.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture

bench: setup  ## the speed figures, measured side by side (keep the machine idle)
	@missed=0; for name in run watching symmetries control rotational problems sharpness forecast training serving scale peers; do \
	  $(BIN)/python benchmarks/$$name.py || missed=1; done; exit $$missed

bench-peers: setup  ## ours beside other tools, which get an environment of their own (minutes, the first time more)
	$(BIN)/python benchmarks/peers.py

# -W, -n: a warning, or a link to nowhere, is an error.
docs: setup  ## run every example of the documentation, then build its site into build/docs (minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/docs tests/test_docs.py tests/test_readme.py
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -q -j 2 -c docs . build/docs
	$(BIN)/python docs/check_site.py build/docs

docs-figures: setup  ## draw the figures of the concept pages again
	@for script in $(filter-out docs/figures/_style.py docs/figures/demo.py docs/figures/serve.py,$(wildcard docs/figures/*.py)); do \
	  $(BIN)/python $$script || exit 1; done

docs-generated: setup  ## write again the pages that come from laws, results and trainings (minutes)
	$(BIN)/python docs/corrections.py
	$(BIN)/python docs/paper_items.py
	$(BIN)/python docs/which_optimizers.py
	$(BIN)/python docs/transformer.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/transformer_in_five_minutes.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/what_watch_tells.py

lock: setup  ## write the lock files from what is installed
	$(BIN)/python tools/lock.py && touch $(STAMP)

clean:  ## remove the environment and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
