# What a contributor types. Plain make: 3.81 (macOS) is enough. No compiler, no root.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := $(VENV)/.native
PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder
# With it every process of the tests would compile Hoop again, and every worker of pytest all tests: 8 s each.
unexport PYTHONDONTWRITEBYTECODE

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' Makefile

install: $(STAMP) $(NATIVE) ## Set up .venv with Hoop and its tools; at once if nothing changed
	@:

train: install ## Train the MNIST model on this machine's cores
	@$(BIN)/hoop train mnist

test: install ## What a change must pass: format, lint, types and the tests
	@$(BIN)/python -m pytest $(PARALLEL)

quick: install ## Lint, types, house rules and unit tests
	@$(BIN)/python -m pytest $(PARALLEL) --numprocesses 3 tests/house tests/unit

everything: install ## All tests, also those that take long and repeat what shorter ones show
	@$(BIN)/python -m pytest $(PARALLEL) -m ''

# One process a file: some tests fork ranks, which a process that has used CUDA itself cannot.
gpu: install ## The tests that need a CUDA GPU; make test skips them where there is none
	@failed=; for file in $$(grep -rl --include 'test_*.py' 'mark\.gpu' tests | sort); do \
	  echo "$$file"; $(BIN)/python -m pytest -m gpu "$$file" || failed="$$failed $$file"; done; \
	  [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

coverage: install ## Coverage of src/hoop by the tests that run in one process, with a floor
	@$(BIN)/python -m pytest $(PARALLEL) --cov --cov-fail-under=65 tests/unit tests/contract tests/engine tests/model

nightly: install ## 100,000 schedules of the recovery model; make test runs 5,000
	@$(BIN)/python tests/model/explore.py --schedules 100000

check: install ## Format, lint and types, changing nothing
	@$(BIN)/python -m ruff format --check --quiet . || { echo "make format repairs this" >&2; exit 1; }
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m mypy

format: install ## Format, and repair what lint can repair
	@$(BIN)/python -m ruff format .
	@$(BIN)/python -m ruff check --fix .

proto: ## Regenerate src/hoop/wire/generated after a change to a .proto file
	@scripts/proto

clean: ## Remove caches and build output; .venv and runs stay
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# An interpreter that .venv lost (an upgrade of the system's) is replaced; otherwise what is there stays.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Hoop needs Python 3.11 or later; '$(PYTHON)' is: $$("$(PYTHON)" --version 2>&1)." >&2; \
	  echo "Name another with: make install PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing Hoop and its tools into $(VENV) (once; PyTorch is the large part) ..."
	@$(BIN)/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

# Without a C compiler Hoop works too: NumPy does the same, with the same bits.
$(NATIVE): $(STAMP) $(wildcard src/hoop/native/*.[ch]) src/hoop/native/build.py
	@$(BIN)/python -m hoop.native.build || true
	@touch $@

.PHONY: help install train test quick everything gpu coverage nightly check format proto clean
