# Two commands on a fresh machine with Python 3.11 or newer and make:
#   make run     the main job on this machine's CPU (or GPU): decode over every cache format, checked and timed
#   make test    all tests
# Others: make lint, make types, make docs (the site, into site/), make figures (docs/figures from benchmarks/results), make clean.
# PYTHON=python3.12 chooses an interpreter.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test lint types docs figures ci clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/leanmla run

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/properdocs build --strict --quiet
	@echo "open site/index.html"

figures: $(VENV)/.installed-dev
	$(BIN)/python tools/figures.py

ci: lint types test docs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "leanmla needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "could not create a virtual environment; on Debian and Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch is large: the first time takes a few minutes)"
	$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) with the test tools (torch is large: the first time takes a few minutes)"
	$(PIP) --editable '.[dev,plot,docs]'
	$(PIP) triton || echo "triton has no wheel for this machine: its tests will be skipped"
	$(PIP) flydsl || echo "flydsl has no wheel for this machine: its tests will be skipped"
	$(PIP) cuda-core cuda-bindings nvidia-cuda-nvrtc || echo "NVRTC has no wheel for this machine: its tests will be skipped"
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
