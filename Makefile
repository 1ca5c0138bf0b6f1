# `make` alone lists the targets. The first one that needs the virtual environment makes it.

PYTHON ?= python3
VENV ?= .venv
QUESTION ?= What is the name of the rescue boat?
# Where PyTorch publishes builds without CUDA, and the one to take: the lowest version that
# pyproject.toml allows. Only an exact version can ask for a build: indexes also have newer ones
# with CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/torch==\1.0+cpu/p' pyproject.toml)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export QUESTION

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test bench lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.run ## read the example document and answer $QUESTION, showing the margins
	$(BIN)/postil ask examples/harbour-book.md "$$QUESTION"

test: $(VENV)/.dev ## run the tests (ARGS="-k pool" passes on to pytest)
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.run ## compare reading with margins to plain reading (ARGS passes on)
	$(BIN)/postil bench margins $(ARGS)

lint: $(VENV)/.dev ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev ## put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.docs ## build the documentation into site/; a warning is an error
	@# --strict does not count what is wrong with docstrings (griffe).
	@said=$$($(BIN)/zensical build --clean --strict 2>&1); code=$$?; echo "$$said"; \
	[ $$code -eq 0 ] && ! echo "$$said" | grep -q '^griffe:'

clean: ## remove all that make has made, the virtual environment too
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# The environment, by layers; each is installed again when pyproject.toml changes.

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Postil needs \
	Python 3.11 or newer: install one and name it, as in 'make PYTHON=python3.12 demo'." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The virtual environment could not be made: install the \
	module venv (Debian and Ubuntu: python3-venv)." >&2; exit 1; }
	$(PIP) install --upgrade "pip>=25.1" # the first with --group
	@touch $@

# On Linux the default index's torch comes with gigabytes of CUDA libraries. Where there is no GPU
# to use them, a CPU build is installed first, so that nothing asks for another one later. It comes
# without its dependencies: these are taken from the default index, with everything else.
$(VENV)/.run: $(VENV)/.pip pyproject.toml
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  $(PIP) install --no-deps --retries 2 --timeout 20 --index-url $(TORCH_INDEX) "$(TORCH)" \
	  || echo "No CPU build of torch could be had: taking what the default index has." >&2; \
	fi
	$(PIP) install --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.pip pyproject.toml
	$(PIP) install --group docs
	@touch $@
