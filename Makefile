# TPU Lab. Two commands matter: `make lab` and `make test`. Nothing here needs root.
#
#   PYTHON=/path/to/python3.12   which Python makes the environment (default: the first of 3.11 to 3.14 on PATH)
#   VENV=.venv                   where the environment goes
#   PORT=8080 HEADLESS=1         for `make lab` on a server: a fixed port, no browser
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                                on Linux: take PyTorch's CPU build from PyTorch's own index (0.2 GB instead of several)

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
PORT ?=
HEADLESS ?=
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
OPEN_FLAGS := $(if $(PORT),--port $(PORT)) $(if $(filter-out 0,$(HEADLESS)),--headless)

.PHONY: help lab test lint types doctor screenshots twins clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "make lab          install into $(VENV) and open the gallery of notebooks (PORT=8080 HEADLESS=1 on a server)"
	@echo "make test         install what the tests need and run them all"
	@echo "make doctor       what is installed, which device is used, what is wrong and the way out"
	@echo "make screenshots  renew the pictures of the README and of the gallery (needs Chromium)"
	@echo "make twins        renew the Jupyter twins that are not up to date, and the tutorials' recorded results"
	@echo "make clean        remove $(VENV) and caches"
	@echo "On Linux, TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids PyTorch's several GB of CUDA libraries."

lab: $(VENV)/.lab-installed
	@exec $(BIN)/tpu-lab open $(OPEN_FLAGS)

# Two workers, a file to each: a file's fixtures are made once.
test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .

types: $(VENV)/.test-installed
	$(BIN)/mypy

doctor: $(VENV)/.lab-installed
	@$(BIN)/tpu-lab doctor

screenshots: $(VENV)/.test-installed
	$(BIN)/python tests/browser/screenshots.py

twins: $(VENV)/.test-installed
	$(BIN)/tpu-lab twins
	$(BIN)/tpu-lab recorded

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Stamps: installed once, and again only when the requirements change.
$(VENV)/.lab-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.test-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[test]"
	@touch $@ $(VENV)/.lab-installed

# A candidate counts when it runs, is new enough and can make environments (a pyenv shim may be there and not run).
$(BIN)/python:
	@set -e; found=; seen=; \
	for name in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
	  version=$$("$$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	  seen="$$seen $$name is $$version;"; \
	  "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue; \
	  if "$$name" -c 'import venv, ensurepip' 2>/dev/null; then found=$$name; break; fi; \
	  seen="$$seen but it lacks venv (on Debian: apt-get install python3-venv);"; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "TPU Lab needs Python 3.11 or newer with venv. Looked for $(or $(PYTHON),python3.11 to 3.14, python3, python):$${seen:- found none.}" >&2; \
	  echo "Way out: install one (https://www.python.org/downloads/), or name it: make lab PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$found --version) ($$found)"; \
	if [ "$$(uname -s)" = Linux ] && [ -z "$(TORCH_INDEX)" ]; then \
	  echo "PyTorch comes from pip's own index. If that starts to fetch several GB of CUDA libraries, stop it and say:"; \
	  echo "  make $(MAKECMDGOALS) TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
	fi; \
	"$$found" -m venv $(VENV)
