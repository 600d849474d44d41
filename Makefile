# All commands of this repository. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
UV     := $(VENV)/bin/uv

# Ready once the virtual environment holds exactly what requirements/dev.txt locks.
READY  := $(VENV)/.ready
# Environment of the tools of `make conformance`.
TOOLS  := .venv-conformance
# Code that exists in this checkout (images carry only some of it).
CODE   := $(wildcard core operator router worker tests examples demos benchmarks dashboards \
              hatch_build.py)
# Installation compiles the kernels; it runs again if one is missing or older than its sources.
KERNELS := $(addprefix worker/medha_worker/attention/,singles.kernel.so chunks.kernel.so) \
        worker/medha_worker/model/arithmetic.kernel.so core/medha/scheduling/rows.abi3.so

# What `make prometheus` unpacks.
PROMETHEUS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/medha-prometheus

# Short forms of the campaigns of `make test-api`, if an API server's programs are installed. Where
# both targets run, test-api has them in the API servers that it starts anyway.
QUICK := tests/api/test_crash_points.py tests/api/test_edit_fuzz.py

# Tests run one worker per core of a small machine (a third one wins 3 % of the time); torch gets one
# thread in each. Those of the operator mostly wait for a server and its clocks; their long campaigns
# start first. With `env` make starts Python without a shell, so that a signal to make ends the tests.
ALONE := env OMP_NUM_THREADS=1 $(PY) -m pytest
PYTEST := $(ALONE) -n 2 --dist loadfile
WAITING := -n 4 --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-cluster images release test test-api test-cluster test-ecosystem check compile format bench lock clean
.PHONY: dashboards prometheus test-dashboards conformance
.PHONY: crash-points edit-fuzz outages

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup: $(READY) ## create .venv from the hash-locked requirements, and install medha into it

$(READY): requirements/bootstrap.txt requirements/dev.txt pyproject.toml hatch_build.py \
        $(wildcard $(addsuffix *.[ch],$(dir $(KERNELS)))) $(KERNELS) | $(UV)
	$(UV) pip sync --quiet --python $(PY) --require-hashes requirements/dev.txt requirements/bootstrap.txt
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation \
	    --reinstall-package medha --editable .
	@touch $@

$(KERNELS):

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "medha needs Python 3.11 or later; run: make setup PYTHON=python3.12" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --require-hashes -r requirements/bootstrap.txt

demo: $(READY) ## play five policies on a small fleet on this machine and draw who waited
	$(PY) -m demos.local

demo-cluster: $(READY) ## install, serve, scale, update and remove a model on a Kubernetes cluster
	$(PY) -m demos.cluster

images: $(READY) ## build the operator's, the router's and the worker's image (DEVICE=cpu: smaller)
	$(PY) -m demos.images $(if $(DEVICE),--device $(DEVICE))

release: $(READY) ## write charts, images, bills of materials and checksums into dist/ (DEVICE=cpu)
	$(PY) -m demos.artefacts $(if $(DEVICE),--device $(DEVICE))

test: $(READY) ## run every test that needs neither a GPU nor a cluster
	$(PYTEST)
	$(if $(filter test-api,$(MAKECMDGOALS)),,$(PYTEST) $(QUICK))

# Full length of the long campaigns of tests/api; without it they are short, or skipped.
WHOLE := MEDHA_CRASH_POINTS=whole MEDHA_EDIT_FUZZ=whole MEDHA_OUTAGES=whole

test-api: $(READY) ## run all tests that need a Kubernetes API server (SHORT=1: short campaigns)
	$(if $(SHORT),,env $(WHOLE)) $(PYTEST) $(WAITING) tests/api

outages: $(READY) ## leave the operator ten minutes without an API server, on a clock ten times as fast
	MEDHA_OUTAGES=whole $(PY) -m pytest -s tests/api/test_long_outages.py

crash-points: $(READY) ## kill the operator at every write of a fleet's life, refuse each, lose each event
	MEDHA_CRASH_POINTS=whole $(PY) -m pytest -s tests/api/test_crash_points.py tests/api/test_fault_walks.py

edit-fuzz: $(READY) ## change a MedhaReplica at random, validly and not, thousands of times
	MEDHA_EDIT_FUZZ=whole $(PY) -m pytest -s tests/api/test_edit_fuzz.py

test-cluster: $(READY) ## run the tests on a whole cluster, if one can be created (SHORT=1: the first file)
	$(ALONE) -rsP tests/cluster$(if $(SHORT),/test_first_answers.py)

test-ecosystem: $(READY) ## run the operator with real Karpenter and KEDA on a cluster, if Go can build them
	$(ALONE) -rs tests/ecosystem

test-dashboards: $(READY) ## scrape a real fleet with a real Prometheus and query every panel and alert
	@command -v prometheus >/dev/null || test -x $(PROMETHEUS)/usr/bin/prometheus || \
	    $(MAKE) --no-print-directory prometheus || true
	$(ALONE) -rs tests/scraped

conformance: $(READY) ## run other clients, load generators and checkers against a fleet (SHORT=1: fewer requests)
	@$(MAKE) --no-print-directory $(TOOLS)/.ready || echo "without the tools of requirements/conformance.txt" >&2
	$(if $(SHORT),,env MEDHA_CONFORMANCE=whole) $(ALONE) -rs tests/conformance

$(TOOLS)/.ready: requirements/conformance.txt | $(UV)
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv --without-pip $(TOOLS)
	$(UV) pip sync --quiet --python $(TOOLS)/bin/python --require-hashes requirements/conformance.txt
	@touch $@

prometheus: ## unpack Debian's prometheus and promtool into the cache, where tests find them
	mkdir -p $(PROMETHEUS)
	cd $(PROMETHEUS) && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

dashboards: $(READY) ## write dashboards/*.json and the chart's copies from the catalogue of metrics
	$(PY) -m dashboards

.PHONY: crd
crd: $(READY) ## write the spec's part of the CRD, here and in the chart, from core/medha/spec
	$(PY) -m medha.adapters.crd

check: $(READY) ## check lint, format, types, layers and the repository's tests
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy $(CODE)
	$(VENV)/bin/lint-imports
	$(PYTEST) tests/repo

compile: $(READY) ## compile the scheduler again after a change (optional: sources run slower)
	$(PY) hatch_build.py

format: $(READY) ## format the code
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

bench: $(READY) ## measure the scheduler and the engine on this machine
	-$(PY) hatch_build.py
	for script in benchmarks/*.py; do $(PY) -m benchmarks.$$(basename $$script .py) || [ $$? -eq 2 ] || exit 1; done

# `make lock LOCK_ARGS=--upgrade` moves every version; plain `make lock` only follows pyproject.toml.
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --no-emit-index-url --no-emit-find-links -c requirements/constraints.txt $(LOCK_ARGS)

lock: | $(UV) ## lock requirements/*.txt from pyproject.toml
	$(COMPILE) pyproject.toml --extra operator -o requirements/operator.txt
	$(COMPILE) pyproject.toml --extra router -o requirements/router.txt
	$(COMPILE) pyproject.toml --extra worker -o requirements/worker.txt
	$(COMPILE) -c requirements/worker.txt pyproject.toml --extra worker --extra cuda -o requirements/cuda.txt
	$(COMPILE) pyproject.toml --extra operator --extra kubernetes-login --extra router \
	    --extra worker --extra sim \
	    --group test --group lint --group build --group release -o requirements/dev.txt
	echo uv | $(COMPILE) - -o requirements/bootstrap.txt
	$(COMPILE) -c requirements/dev.txt --group pyproject.toml:build -o requirements/build.txt
	$(COMPILE) --group pyproject.toml:conformance -o requirements/conformance.txt

clean: ## remove the virtual environment, caches and build outputs
	rm -rf $(VENV) $(TOOLS) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
