# make demo | test | test-full | lint | format | docs | setup. Each does all set-up from nothing, once.
#   PYTHON=python3.12   the interpreter the environment is made from (3.10 or newer)
#   TORCH=torch==2.12.0 what is installed when that interpreter imports no torch of its own
#   VENV=.venv          where the environment goes
#   JOBS=2              test processes
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.setup-done
# One thread a process: tests run JOBS at a time and distributed ones start up to four more.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile
DEMO ?= experiment=demo

.PHONY: demo test test-full lint format docs setup clean
.DEFAULT_GOAL := test

setup: $(READY)

$(READY): pyproject.toml tools/bootstrap.py
	$(PYTHON) tools/bootstrap.py $(VENV) --torch "$(TORCH)"
	@touch $@

demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/lumen-train $(DEMO)

test: lint
	$(PYTEST) -m "not slow"

test-full: lint
	$(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Documentation that the code generates.
docs: $(READY)
	$(BIN)/python -m lumen_core.options docs/options.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
