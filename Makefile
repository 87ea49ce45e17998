# Two commands do everything: `make demo` and `make test`. Both set the environment up first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= auto

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-servers coverage lint format docs bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'from quantdrift.drift.detectors.protocol import compile_all; compile_all()'
	@touch $@

demo: setup ## Run the whole loop on real input; DEMO="--keep" leaves it running
	$(BIN)/python -m examples.digits $(DEMO)

test: lint ## Run the linters and every test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

test-servers: setup ## Run the tests with every real server, the large ones too (5 GB; Java for TorchServe)
	TEST_SERVERS=all $(BIN)/python -m pytest -m servers tests/servers

coverage: setup ## Tell by branch what the tests reach
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered $(TESTS)

lint: setup ## Check style, types and the import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## Write the generated pages anew
	$(BIN)/python docs/generate.py

bench: setup ## Run every benchmark in its quick form
	$(BIN)/python -m benchmarks --quick

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build out .quantdrift .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
