# Everything below sets itself up; all it needs is Python 3.11 or newer, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch that the tests are pinned to.
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-integration test-wire lint format protos dashboards \
	bench-import bench-step bench-exit build clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo,test,lint,dashboards]'
	touch $@

setup: $(VENV)/.installed  ## Make the virtual environment.

demo: setup  ## Train on real digits under torchperfd, capture, scrape, analyse; about half a minute.
	$(BIN)/python client/examples/demo.py

test: setup lint test-wire  ## All that CI runs.
	$(BIN)/python -m pytest

test-unit: setup  ## The fast tests.
	$(BIN)/python -m pytest tests/unit

test-integration: setup  ## The tests with real processes.
	$(BIN)/python -m pytest tests/integration

test-wire: setup  ## The wire tests on the oldest and the newest supported grpcio and protobuf.
	tools/test_wire.sh

lint: setup  ## Style, types and architecture.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos:  ## Regenerate client/torchperfd/v1 from protos/.
	tools/gen_protos.sh

dashboards: setup  ## Regenerate grafana/dashboards.
	$(BIN)/python -m grafana.build

bench-step: setup  ## What a step costs the training thread.
	$(BIN)/python benchmarks/step_cost.py

bench-exit: setup  ## How much later a script exits.
	$(BIN)/python -m benchmarks.exit_delay

bench-import: setup  ## What `import torchperfd` costs.
	$(BIN)/python benchmarks/import_time.py

build: setup  ## Build the wheel into dist/.
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:  ## Remove all that make has made.
	rm -rf $(VENV) .venv-protos .venv-wire-* build dist demo-out
