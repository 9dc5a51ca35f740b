# Everything below sets itself up; all it needs is Python 3.11 or newer, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tools of a release.
RELEASE := .venv-release
# Nothing but pip.
WHEEL := .venv-wheel
# The CPU build of torch that the tests are pinned to.
TORCH := torch==2.13.0
# Where bytecode is not written, each of thousands of processes compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=
# Tests wait about half of the time, so three share two processors.
WORKERS := $(shell expr $$(nproc) \* 3 / 2)
# Tests with real processes: most run three at a time; those marked serial come after them.
REAL := $(BIN)/python -m pytest tests/scenarios tests/integration tests/tutorials
ABREAST := -n 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-nightly mutation test-unit test-quick test-slow test-real test-integration test-wire lint format protos screenshots dashboards dashboard-pictures docs man \
	bench-import bench-step bench-device bench-templates bench-overhead gpu-proof bench-daemon bench-advice bench-tune \
	bench-loader-search bench-agreement \
	bench-analysis bench-memory bench-exit bench-steady bench-capture \
	bench-fleet bench-onset bench-scale bench-faults bench-soak bench-page bench-page-daemon bench-top bench-trials bench-runs \
	build manifests release-check debs locks clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

PIP := $(BIN)/pip install -q --disable-pip-version-check
DEV_GROUPS := demo test mutation lint dashboards docs pictures

$(VENV)/.installed: pyproject.toml locks/development.txt hatch_build.py $(wildcard client/torchperfd/events/native/*) $(wildcard daemon/torchperfd_daemon/analysis/native/*) client/torchperfd/steps/_templates.c client/torchperfd/launch/_sigterm.c
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(TORCH)
	$(PIP) -c locks/development.txt -e '.[wandb,tensorboard,mlflow]' $(addprefix --group ,$(DEV_GROUPS))
	touch $@

# Real frameworks for tests/frameworks. Those that ask for torchvision or fastai come without
# their dependencies, which would bring a CUDA build of torch, or a server that the daemon's would use.
$(VENV)/.frameworks: $(VENV)/.installed
	$(PIP) $(TORCH) lightning==2.6.6 transformers==5.23.0 accelerate==1.15.0 pytorch-ignite==0.5.5
	$(PIP) --no-deps torchvision==0.28.0 fastai==2.8.12 fastcore==2.2.39 fastprogress==1.1.6 \
		fastdownload==0.0.8 fasttransform==0.0.5 python-fasthtml==0.14.14 fastxtend==0.1.7 torchdata==0.11.0
	$(PIP) $(TORCH) plum-dispatch==2.9.0 matplotlib==3.11.2 pandas==3.1.1 itsdangerous oauthlib \
		python-multipart beautifulsoup4 httpx2
	touch $@

# Helm, kubectl and schemas for tests/deploy.
.venv-kube/.installed: tools/kube_tools.sh
	rm -f $@
	PYTHON=$(PYTHON) tools/kube_tools.sh

setup: $(VENV)/.installed  ## Make the virtual environment.

demo: setup  ## Train on real digits under torchperfd, capture, scrape, analyse; about a minute.
	$(BIN)/python client/examples/demo.py

test: lint test-unit test-quick  ## Style, types, architecture and all tests that are quick; under 15 minutes with set-up.

test-all: lint test-unit test-wire test-real  ## All tests of CI: the slow tests, real frameworks, and other versions of grpcio as well.

test-nightly: export TORCHPERFD_TEST_FRESH_SEED = 1
test-nightly: test-all  ## The same with examples that no run has played before.

mutation: setup  ## The mutation score of the pure rooms, on a sample; about 20 minutes.
	$(BIN)/python -m tools.mutation $(MUTATION)

test-unit: setup  ## The fast tests, side by side.
	$(BIN)/python -m pytest tests/unit -n $(WORKERS)

test-quick: setup  ## The quick tests with real processes.
	$(REAL) -m 'not slow and not serial' $(ABREAST)
	$(REAL) -m 'not slow and serial'

# In one run of pytest the quick tests fill what the last slow ones leave of the processors.
test-real: setup  ## All tests with real processes, and real frameworks.
test-slow: setup  ## The slow tests with real processes, and real frameworks.
test-slow: AMONG := slow and
test-real test-slow:
	$(MAKE) -j 2 --output-sync $(VENV)/.frameworks .venv-kube/.installed
	$(BIN)/python -m pytest tests/deploy tests/frameworks $(ABREAST) --no-loadscope-reorder  # the longest first
	$(REAL) -m '$(AMONG) not serial' $(ABREAST)
	$(REAL) -m '$(AMONG) serial'

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

docs: setup  ## Build the documentation site into site/; broken links are errors.
	$(BIN)/python tools/docs_site.py

manifests: .venv-kube/.installed  ## Render deploy/kubernetes/base/torchperfd.yaml from the Helm chart.
	tools/manifests.sh > deploy/kubernetes/base/torchperfd.yaml

man: setup  ## Write the man page to deploy/man/torchperfd.1, from the command line itself.
	$(BIN)/python tools/man_page.py

screenshots: setup  ## Draw the pictures of the terminal and the live page in docs/images; needs Chromium; up to five minutes.
	$(BIN)/python tools/screenshots.py

dashboards: setup  ## Regenerate Grafana's dashboards, the rules and their tests.
	$(BIN)/python -m grafana.build

dashboard-pictures: setup  ## Draw dashboards of a simulated node in docs/images; needs npm, Chromium, Prometheus; ten minutes.
	$(BIN)/python tools/dashboard_pictures/draw.py fleet run

bench-step: setup  ## What a step costs the training thread.
	$(BIN)/python -m benchmarks.step_cost

bench-device: setup  ## What a step costs where the device runs behind the host, on a simulated one; three minutes.
	$(BIN)/python -m benchmarks.device_cost

bench-templates: setup  ## What step templates save on millisecond steps; a minute.
	$(BIN)/python -m benchmarks.step_templates

bench-overhead: setup  ## What a step costs beside the other profilers; about forty minutes.
	$(BIN)/python -m benchmarks.overhead

bench-runs: setup  ## How often a comparison of two runs is right, on simulated pairs; four minutes.
	$(BIN)/python -m benchmarks.run_comparison

bench-memory: setup  ## Whether ten million steps fit into the memory of one million; two minutes.
	$(BIN)/python -m benchmarks.memory_flat

bench-tune: setup  ## Whether `torchperfd tune` finds and verifies the right gains, on six scripts; about ten minutes.
	$(BIN)/python -m benchmarks.tune

bench-loader-search: setup  ## Whether `bench dataloader` finds the best setting, beside full grids; ten minutes.
	$(BIN)/python -m benchmarks.loader_search

bench-agreement: setup  ## Whether `bench compare` agrees with torch.utils.benchmark by hand; eight minutes.
	$(BIN)/python -m benchmarks.bench_agreement

bench-advice: setup  ## Whether applying an advice saves what it predicts.
	$(BIN)/python -m benchmarks.advice

bench-analysis: setup  ## What analysing a trace costs, beside HTA; about five minutes.
	$(BIN)/python -m benchmarks.analysis

bench-daemon: setup  ## What the daemon costs: CPU, memory, scrapes, ingest, drift; about eight minutes.
	$(BIN)/python -m benchmarks.daemon

bench-capture: setup  ## What a capture costs the training, beside torch.profiler by hand; about five minutes.
	$(BIN)/python -m benchmarks.capture

bench-fleet: setup  ## How long a thousand daemons take to answer; one minute.
	$(BIN)/python -m benchmarks.fleet

bench-scale: setup  ## What diagnosing a thousand ranks costs; at first eight minutes more, to record real noise.
	$(BIN)/python -m benchmarks.accuracy.scale

bench-onset: setup  ## How soon a slowdown is noticed, and how often there was none; at first 20 minutes, to record real noise.
	$(BIN)/python -m benchmarks.accuracy.onset

bench-faults: setup  ## Whether the diagnosis is right, on jobs with a known fault; about 50 minutes.
	$(BIN)/python -m benchmarks.faults

bench-soak: setup  ## Whether a healthy run that saves and validates a lot is left alone; 15 minutes.
	$(BIN)/python -m benchmarks.faults.soak

bench-page-daemon: setup  ## What open pages cost the daemon, and a training thread; ten minutes.
	$(BIN)/python -m benchmarks.page.daemon
	$(BIN)/python -m benchmarks.page.training

bench-top: setup  ## What `top` costs while it is open, and how fast it opens; one minute.
	$(BIN)/python -m benchmarks.top

bench-page: setup  ## What the live page weighs, how fast it draws, and how soon a step is on it; three minutes.
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.page.history
	$(BIN)/python -m benchmarks.page.latency

bench-trials: setup  ## Whether torchperfd changes what a script does, in 500 randomised trials; about an hour.
	$(BIN)/python -m benchmarks.trials --count 500

bench-steady: setup  ## Whether the advice on a loader stays the same for ten minutes, and is one number everywhere.
	$(BIN)/python -m benchmarks.steady_advice

bench-exit: setup  ## How much later a script exits.
	$(BIN)/python -m benchmarks.exit_delay

gpu-proof: setup  ## What is claimed about GPUs, on one: about ten minutes; without a GPU a rehearsal.
	$(BIN)/python -m benchmarks.gpu_proof

bench-import: setup  ## What `import torchperfd` costs.
	$(BIN)/python benchmarks/import_time.py

# Without `make setup`, whose torch takes two gigabytes. Beside an older wheel, pip would refuse torchperfd-*.whl.
build:  ## Build the wheel for this machine into dist/; needs a C compiler.
	rm -f dist/torchperfd-*-linux_*.whl
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip wheel -q --disable-pip-version-check --no-deps -w dist .

$(RELEASE)/.installed: locks/release.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q --disable-pip-version-check --require-hashes -r locks/release.txt
	touch $@

release-check: $(RELEASE)/.installed  ## Build all files of a release of HEAD into dist/, and check them; three minutes.
	$(RELEASE)/bin/python -m tools.release.build
	$(RELEASE)/bin/python -m tools.release.check

debs: $(RELEASE)/.installed  ## Build Debian packages from the wheels in dist/, beside them; needs dpkg-deb; a minute.
	$(RELEASE)/bin/python -m tools.release.deb

# uv keeps the versions in the files that it overwrites, as far as they still fit: remove a file to renew all.
UV := $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header

locks: setup  ## Write the versions in locks/ anew after a change of the dependencies in pyproject.toml.
	$(PIP) uv
	$(UV) --generate-hashes --extra web --extra s3 --extra otlp pyproject.toml -o locks/runtime.txt
	$(UV) --generate-hashes --group release -o locks/release.txt
	$(UV) --extra all $(addprefix --group ,$(DEV_GROUPS)) pyproject.toml -o locks/development.txt

clean:  ## Remove all that make has made.
	rm -rf $(VENV) $(RELEASE) $(WHEEL) .venv-kube .venv-protos .venv-peers .venv-peers-analysis .venv-wire-* build dist demo-out
