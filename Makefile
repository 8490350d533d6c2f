# make quickstart   trains a small CPLM and its baseline, and writes runs/quickstart/report.html
# make test         runs the tests
# make check        lint and types
# Each makes the virtual environment first if need be. PYTHON=python3.12 chooses the interpreter,
# VENV=folder where the environment lies, FLAGS="--train.steps 20" goes to the quickstart.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
WORKERS ?= 2
export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV))/jax_cache
# Small programs too: the tests start many processes, each of which would compile them again.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

.PHONY: quickstart test check format clean

quickstart: $(VENV)/.installed
	@$(BIN)/cplm quickstart $(FLAGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: requirements.txt constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed; install one or set PYTHON=..." >&2; exit 2; }
	@echo "making the virtual environment $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
