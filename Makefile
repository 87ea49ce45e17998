# Two commands do everything: `make demo` and `make test`. Both set the environment up first.
# TORCH_INDEX=URL: a package index that pip looks at as well. With PyTorch's own index for the CPU no CUDA library is installed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= auto
COLOUR := $(if $(MAKE_TERMOUT),--color=yes)
TORCH_INDEX ?=

# The tests start hundreds of Python processes: without compiled files each compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-text check test test-release coverage lint format docs pictures docs-site bench images locks scan release clean gameday

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install everything into it; TORCH_INDEX=URL for torch without CUDA

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -n "$(TORCH_INDEX)" || command -v nvidia-smi >/dev/null || \
	  echo 'No GPU here. `make setup TORCH_INDEX=URL` avoids 3 GB of CUDA libraries: see docs/how-to/install.md.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	$(BIN)/python -c 'from quantdrift.drift.detectors.protocol import compile_all; compile_all()'
	@touch $@

demo: setup ## Run the whole loop on real input; DEMO="--keep" leaves it running
	$(BIN)/quantdrift demo $(DEMO)

demo-text: setup ## The same with a language model behind llama.cpp's server; DEMO="--keep" leaves it running
	$(BIN)/quantdrift demo --text $(DEMO)

# Linters and tests run side by side. Each says at once what is wrong, and what the linters said is repeated at the end.
LINTERS := "ruff format --check --quiet ." "ruff check --quiet ." "python -m docs.generate --check" lint-imports mypy
define beside_lint
	@{ { $(MAKE) --no-print-directory lint >&3 2>&1 || :; } | \
	  $(BIN)/python -m pytest -n $(1) $(COLOUR) $(2) </dev/null; tests=$$?; } 3>&1; \
	test ! -s out/lint.txt || { cat out/lint.txt; echo "make lint failed: its messages are above" >&2; }; \
	test $$tests = 0 || echo "tests failed: they are listed above" >&2; \
	test $$tests = 0 -a ! -s out/lint.txt
endef

check test: export HYPOTHESIS_PROFILE ?= quick
check: setup ## Run the linters and the quick ones of the tests marked unit, contract or property
	$(call beside_lint,$(JOBS:auto=logical),-m "(unit or contract or property) and not slow" tests/unit tests/contract tests/property)

test: setup ## Run the linters and the tests: each feature end to end, not what only a release needs
	$(call beside_lint,$(JOBS),$(TESTS))

test-release: setup ## Run every test: all servers (5 GB; Java for TorchServe), the images, the whole demo, all laws
	$(call beside_lint,$(JOBS),--release $(TESTS))

coverage: setup ## Run the tests and report coverage by branch
	$(BIN)/python -m pytest -n $(JOBS) --cov --cov-report=term:skip-covered $(TESTS)

lint: setup ## Check style, generated pages, import layers and types
	@mkdir -p out && : >out/lint.txt; \
	for linter in $(LINTERS); do \
	  said=$$($(BIN)/$$linter 2>&1) || printf '\n%s:\n%s\n' "$$linter" "$$said" | tee -a out/lint.txt; \
	done; \
	test ! -s out/lint.txt

format: setup ## Format the code and fix what can be fixed automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## Regenerate the generated pages of docs/reference
	$(BIN)/python -m docs.generate

pictures: setup ## Make the pictures of the pages again from a run of the demo; needs Chromium
	$(BIN)/python -m docs.pictures

docs-site: setup ## Build the pages as a site with a search, in out/site
	$(BIN)/python -m docs.site

bench: setup ## Run every benchmark in its quick form
	$(BIN)/python -m benchmarks --quick

gameday: setup ## Do faults one after another and write what a person sees of each: out/gameday.html; GAMEDAY="--fault 'kill nats'"
	$(BIN)/python -m benchmarks.gameday $(GAMEDAY)

images: ## Build the images by podman, docker or buildah; IMAGES="sidecar monitor" builds these alone
	$(PYTHON) deploy/images/build.py $(IMAGES)

locks: setup ## Write the hashed locks of the images from pyproject.toml and constraints.txt
	$(BIN)/python deploy/images/build.py --lock

scan: setup ## Compare the locks with the known weaknesses in OSV=all.zip, an export of osv.dev for PyPI; no network
	$(BIN)/python deploy/scan.py $(OSV)

release: setup ## Build sdist and wheel of the last commit into dist, the same bytes on every machine; SIGN=KEY signs them with an SSH key
	$(BIN)/python deploy/release.py $(if $(SIGN),--sign $(SIGN))

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist out .quantdrift .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
