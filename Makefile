# `make demo` and `make test` each set everything up by themselves, in .venv.
PYTHON ?= python3
# The CPU build of torch that CI uses. `make demo CONSTRAINTS=` takes the newest torch (on Linux: with CUDA).
CONSTRAINTS ?= constraints-cpu.txt
BIN := .venv/bin
PYTEST_ARGS ?=

.PHONY: demo test lint format setup clean

setup: .venv/.installed

.venv/.installed: pyproject.toml $(wildcard $(CONSTRAINTS))
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "maelm_hf needs Python 3.11 or newer, found %s: set PYTHON=python3.11" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(CONSTRAINTS),constraints-cpu.txt)
	# PyPI's torchvision is built for PyPI's torch. Beside a CPU-only torch it breaks every `import transformers`, so it
	# stays out of the environment, in a folder that only pytest sees (pyproject.toml), with timm, which needs it.
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[train,dev,export]'
	$(BIN)/python -m pip install -c $(CONSTRAINTS) --quiet --no-deps --upgrade --target .venv/vision timm torchvision
else
	$(BIN)/python -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[train,vision,dev,export]'
endif
	touch $@

# FAST=1: a two-minute version of the same path, for CI.
demo: setup
	$(BIN)/python -m training.demo $(if $(FAST),--fast)

test: lint
	$(BIN)/python -m pytest --cov=maelm_hf --cov-report=term $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mlinter --no-progress --no-cache maelm_hf

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs dist build
