# Every command sets up what it needs: a machine with Python 3.11 or newer and make is enough.

# the first Python on the path that is new enough; or say which: make setup PYTHON=/usr/bin/python3.12
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$python" && break; done)
# where pip takes torch from, when not from its usual index
TORCH_INDEX ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint conformance up bench chaos chaos-report soak simulate fuzz clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(BIN)/installed  ## create .venv with all that Tokenmill needs (only when it has changed)

demo: setup  ## run 48 prompts through the whole service and show answers and statistics
	$(BIN)/tokenmill demo

test: setup lint $(BIN)/triton-installed  ## check style, types and imports, then run all tests
	$(BIN)/python -m tests.compile_kernels
	# four on two cores, for many tests wait for processes
	$(BIN)/python -m pytest -n 4 --dist loadfile

lint: setup  ## check style, types and imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

conformance: setup  ## what the unmodified OpenAI client finds at `tokenmill up`, on both databases
	$(BIN)/python -m pytest -m "long or not long" tests/conformance

up: setup  ## run the service on http://127.0.0.1:8000 until Ctrl-C
	$(BIN)/tokenmill up

bench: setup  ## measure the engine alone and the whole service
	$(BIN)/tokenmill models fetch smollm2-135m-instruct
	$(BIN)/python bench/throughput.py --workload bench/workload.json --only W1,W2 --repeat 3 --json
	$(BIN)/python bench/throughput.py --workload bench/workload.json --only W1 --repeat 3 \
		--through service --json

chaos: setup  ## kill, freeze and cut off everything under load, for an hour; check every promise
	$(BIN)/tokenmill models fetch smollm2-135m-instruct
	$(BIN)/python -m tests.chaos.long --smollm2 .tokenmill/models/smollm2-135m-instruct $(CHAOS)

chaos-report: CHAOS += --report
chaos-report: chaos  ## the same, and keep its table and its JSON in bench/results

soak: setup  ## run under light faults for MINUTES (30); print how memory, files and threads grow
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30)

simulate: setup  ## run SEEDS (10,000) random deployments from seed FIRST (0) on, in one thread
	$(BIN)/python -m tests.simulation.service $(or $(FIRST),0) $(or $(SEEDS),10000)

fuzz: setup  ## send REQUESTS (5,000) odd calls to a service, by its OpenAPI document; judge replies
	$(BIN)/python -m tests.e2e.fuzz --requests $(or $(REQUESTS),5000)

clean:  ## remove .venv and caches; models and databases in .tokenmill stay
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.tokenmill/*' -exec rm -rf {} +

$(BIN)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Tokenmill needs Python 3.11 or newer: none found" >&2; exit 1; }
	@echo "installing Tokenmill into .venv: a few minutes the first time"
	"$(PYTHON)" -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url "$(TORCH_INDEX)" \
		--constraint constraints.txt torch)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[embedded,dev]"
	@touch $@

# for tests alone: the GPU kernels are proven without a GPU, and 700 MB is much to ask of a demo
$(BIN)/triton-installed: $(BIN)/installed
	@echo "installing Triton for the tests of the GPU kernels"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[gpu]"
	@touch $@
