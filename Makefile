# One command per task; `make` alone lists them. Needs only make and Python 3.11 or later.

PYTHON ?=
# More than there are cores: most tests wait for real processes and for deadlines.
JOBS ?= 8
# Seed of the order of the tests: the same commit has the same order; `make test SEED=2` uses another one.
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready
PYTEST_OPTIONS := -n $(JOBS) --dist loadfile --no-loadscope-reorder --randomly-seed=$(SEED)
# The tests whose result could depend on the version of Postgres or Redis.
SERVER_TESTS := $(addprefix tests/,embedded ingest migrations races store transitions background admin client worker tasks acceptance)
# Folders with many quick tests that need no server. Those of the connectors wait for servers of their own.
FAST_TESTS := $(addprefix tests/,domain workflows architecture deploy support test_config.py test_celeryconfig.py)
# What a version of a dependency could change: imports, SQL, workers, brokers, HTTP, spans.
LOWEST_TESTS := $(addprefix tests/,test_config.py domain/test_model_payloads.py domain/test_payloads.py workflows migrations \
    store/test_database.py store/test_connections.py client/test_publishing.py transitions/test_publish.py cli/test_help.py \
    cli/test_answers.py ingest/test_queue.py connectors/test_http.py acceptance/test_celery_app.py api telemetry/test_worker_traces.py \
    test_celeryconfig.py connectors/test_celery.py acceptance/test_existing_tasks.py)
LOWEST := .venv-lowest
REDIS_BIN ?=
POSTGRES_BIN ?=
# The engine's tests measure threads, memory and time: they run in separate processes, without other tests. Most wait.
NOT_ENGINE := --ignore=tests/consumer_engine
# The cost per item is compared with a bare loop: that test runs alone.
OVERHEAD := tests/consumer_engine/test_overhead.py
ENGINE := -n 6 --randomly-seed=$(SEED) --ignore=$(OVERHEAD) tests/consumer_engine
STATIC := type audit lowest-venv fmt-check lint contracts
# Hundreds of Python processes start during the tests: without kept bytecode each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
PATHS := pipeline celery_durable_effects tests migrations examples tools celeryconfig.py

.DEFAULT_GOAL := help
.PHONY: help setup audit fuzz check test test-fast test-lowest lowest-venv test-versions test-servers coverage fmt fmt-check lint type contracts docs browser migrate demo release lock lock-check clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with exactly the packages of requirements.lock; nothing to do when it is current

$(READY): requirements.lock pyproject.toml
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "make: no Python 3.11 or later with venv found; install one, or name it: make setup PYTHON=..." >&2; \
	    exit 1; \
	fi; \
	echo "setting up $(VENV) with $$($$python --version)" && $$python -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync -q --require-hashes requirements.lock  # removes what the lock does not name
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@

# Each of STATIC uses one core at most, or waits for the network. Some of the tests measure: they run alone.
check: setup ## everything that CI checks
	@$(MAKE) --no-print-directory -j 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) $(STATIC)
	@$(MAKE) --no-print-directory coverage
	@$(MAKE) --no-print-directory test-lowest

# The tests of the console need a browser. Where it cannot be installed they say so, and fail only in CI.
browser: ## install Debian's chromium for the tests of the console, where this machine allows it
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else echo "make: no chromium, and no root with apt-get to install it; the tests of the console are skipped" >&2; fi

test: setup browser ## all tests; starts the Postgres and the Redis of the locked wheels
	$(PY) -m pytest $(PYTEST_OPTIONS) $(NOT_ENGINE)
	$(PY) -m pytest $(ENGINE)
	$(PY) -m pytest $(OVERHEAD)

test-fast: setup ## the tests that need no server
	$(PY) -m pytest -n 2 --randomly-seed=$(SEED) -m "not server" $(FAST_TESTS)

fuzz: setup ## try the parsers of outside bytes with a million examples each; end it when you like
	$(PY) -m pytest -n $(JOBS) -o timeout=0 --hypothesis-profile=fuzz tests/test_fuzz.py

test-servers: setup ## the tests of the servers on chosen ones: REDIS_BIN=/path/to/redis-server POSTGRES_BIN=/path/to/bin
	PIPELINE_REDIS_BIN='$(REDIS_BIN)' PIPELINE_POSTGRES_BIN='$(POSTGRES_BIN)' $(PY) -m pytest $(PYTEST_OPTIONS) $(SERVER_TESTS)

test-versions: setup ## a part of the tests with other Pythons, Celeries and Postgreses: VERSIONS='celery-5.4 postgres-14'
	$(PY) -m tools.versions $(VERSIONS)

test-lowest: lowest-venv ## a part of the tests with the lowest versions that pyproject.toml declares
	$(LOWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --randomly-seed=$(SEED) -p no:cacheprovider $(LOWEST_TESTS)

lowest-venv: setup
	@test -x $(LOWEST)/bin/python || $(BIN)/uv venv -q --python $(PY) $(LOWEST)
	@VIRTUAL_ENV=$(LOWEST) $(BIN)/uv pip sync -q --require-hashes requirements-lowest.lock
	@VIRTUAL_ENV=$(LOWEST) $(BIN)/uv pip install -q --no-deps -e .

coverage: setup browser
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_OPTIONS) $(NOT_ENGINE)
	$(PY) -m pytest $(ENGINE)
	$(PY) -m pytest $(OVERHEAD)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

fmt: setup ## format the code and repair what the linter can
	$(BIN)/ruff check --fix-only -q $(PATHS)
	$(BIN)/ruff format $(PATHS)

fmt-check: setup
	$(BIN)/ruff format --check $(PATHS)

lint: setup ## run the linter
	$(BIN)/ruff check $(PATHS)

type: setup ## check the types
	$(BIN)/mypy

contracts: setup ## check which packages import which
	$(BIN)/lint-imports

audit: setup ## ask for known vulnerabilities of the locked packages
	$(PY) -m tools.audit

docs: setup ## write the generated pages again, build the site in build/site, list its links to other sites
	$(PY) -m tools.docs
	$(PY) -m tools.website --external

migrate: setup ## bring the database of PIPELINE_DATABASE_URL up to date
	$(BIN)/pipeline db upgrade

release: setup ## build wheel and sdist, and check everything but the upload; needs a package index
	$(PY) -m tools.release

demo: setup ## run a whole system with a workload and print a summary
	$(PY) -m tools.demo

RESOLVE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url
COMPILE := $(RESOLVE) pyproject.toml --extra http --extra otel --extra console --extra oidc --extra codec

FRAMEWORKS := --extra async --extra django --extra flask

lock: setup ## resolve the dependencies again: all of them, those of the image, and what builds it
	$(COMPILE) --extra servers $(FRAMEWORKS) --group dev -o requirements.lock
	$(COMPILE) --no-annotate --constraints requirements.lock -o deploy/requirements.lock
	$(COMPILE) --resolution lowest-direct --extra servers $(FRAMEWORKS) --group test -o requirements-lowest.lock
	echo hatchling | $(RESOLVE) - --no-annotate -o deploy/build.lock

lock-check: lock ## resolve again and fail if a lock changed; needs a package index
	git diff --exit-code --stat -- '*.lock'

clean: ## stop the embedded servers; remove their data, the caches and what was built
	@if [ -x $(PY) ]; then $(PY) -c 'from pathlib import Path; from pipeline.embedded import servers; \
	    servers.remove(Path(".pipeline"))'; fi
	rm -rf .pipeline build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
