# `make` alone lists the targets. Everything runs from .venv, which `make setup` builds from Python 3.11 or newer.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-python e2e explore lint lint-workflows image test-image test-chart audit secrets sbom sizes dist release-check docs docs-serve bench bench-peers bench-scale campaign soak crash test-backup test-bucket test-cluster test-keys test-members test-rebalance test-tasks test-upgrade test-spark test-spark-versions test-engines test-incidents fuzz fuzz-coverage hostile sim sim-bank spec spec-histories clean

# Container images often set it. The tests start hundreds of interpreters, and each would compile every module anew: twice the time in all.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# uv's own program cannot be trusted to be installed, nor to be new enough to read the lock file.
UV := .tools/bin/uv
STAMP := .venv/.synced
# The same with the clients of the peers that `make bench` knows.
BENCH_STAMP := .venv/.synced-bench
# The same with the fuzzer of `make fuzz-coverage`.
FUZZ_STAMP := .venv/.synced-fuzz
# What builds the site has an environment of its own.
DOCS_STAMP := .tools/docs/.synced
# The demo needs a quarter of what .venv has. Once there is a .venv, it runs there, so that no second environment is kept up to date.
DEMO := $(if $(wildcard $(STAMP)),.venv,build/demo)
UV_HERE = UV_SYSTEM_CERTS="$${UV_SYSTEM_CERTS:-1}" UV_HTTP_TIMEOUT=300 UV_HTTP_RETRIES=10 UV_PYTHON_DOWNLOADS=never
SYNC = $(UV_HERE) UV_PROJECT_ENVIRONMENT=.venv $(UV) sync --locked --all-extras --python .tools/bin/python
# What the dashboard has from others; the directory is not in the repository.
VENDOR := src/sluiceway/server/ui/assets/vendor
ASSETS := $(VENDOR)/htmx/SOURCE
LINTED := src simulation spec bench tests tools conformance
# Whole files, so that a server which one has started is its own; in the order of tests/conftest.py. Most tests wait, so there are more at a
# time than cores.
PARALLEL = -n $(or $(JOBS),4) --dist loadfile --no-loadscope-reorder
COMMA := ,
# All that a user may install, but for the Ray of `sluiceway-client[ray]`: a Ray cluster brings its own.
LOCKED = $(UV) export --locked --all-extras --no-dev --no-emit-workspace --quiet

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make demo INPUT=path      the same path on your own CSV, JSON lines, Parquet or text"
	@echo "  make test ARGS='-k name'  more arguments for pytest (also: make crash); JOBS=1: one file at a time"

setup: $(ASSETS) $(STAMP) ## Build .venv from the lock files (does nothing when up to date)

$(UV):
	@set -e; \
	python=; \
	for candidate in python3.13 python3.12 python3.11 python3 python; do \
		if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make setup: no Python 3.11 or newer with its venv module was found. Install one (on Debian: python3 and python3-venv)." >&2; \
		exit 1; \
	fi; \
	echo "Tools: $$("$$python" --version), uv"; \
	rm -rf .tools; \
	"$$python" -m venv .tools; \
	.tools/bin/python -m pip install --quiet --disable-pip-version-check --timeout 60 --retries 10 'uv>=0.9'

# The machine's own certificates, as pip uses them, so that it also works behind a proxy that has its own root. Patient, as Spark is large.
$(STAMP): pyproject.toml uv.lock | $(UV) $(ASSETS)
	@$(SYNC)
	@touch $@

build/demo/.synced: pyproject.toml uv.lock | $(UV) $(ASSETS)
	@$(UV_HERE) UV_PROJECT_ENVIRONMENT=build/demo $(UV) sync --locked --extra demo --no-default-groups --python .tools/bin/python
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(SYNC) --group bench
	@touch $@

$(FUZZ_STAMP): $(STAMP)
	@$(SYNC) --group fuzz
	@touch $@

$(ASSETS): tools/assets.lock.json tools/assets.py | $(UV)
	@.tools/bin/python tools/assets.py
	@touch $@

demo: $(ASSETS) $(DEMO)/.synced ## A real Spark pipeline fed by a real queue, with a ledger at the end (needs no `make setup`)
	@$(DEMO)/bin/sluiceway demo $(if $(INPUT),--input "$(INPUT)") $(if $(KILL),--kill "$(KILL)")

# pytest compiles each test module when it first meets it. In a new checkout that is done once, beside the linters, and not by each worker.
test: setup ## Lint, then every test but the slow ones
	@compiling=; \
	[ -d tests/core/__pycache__ ] || { $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 & compiling=$$!; }; \
	$(MAKE) --no-print-directory lint || { [ -z "$$compiling" ] || kill $$compiling; exit 1; }; \
	[ -z "$$compiling" ] || wait $$compiling || true
	@$(BIN)/python -m pytest -m "not slow and not e2e" $(PARALLEL) $(ARGS)

# An environment for each combination, in build/python. `make setup` has nothing to do with it, but tests/repository builds wheels with its uv.
test-python: $(UV) $(ASSETS) ## `make test` without lint under another Python (PYTHON=python3.13), or another PySpark too (PYSPARK=4.2)
	@test -n "$(PYTHON)" || { echo "make test-python: name one, such as PYTHON=python3.13" >&2; exit 1; }
	@set -e; place=build/python/$(notdir $(PYTHON))$(if $(PYSPARK),-pyspark-$(PYSPARK)); \
	$(UV_HERE) UV_PROJECT_ENVIRONMENT=$$place $(UV) sync --locked --all-extras --quiet --python "$(PYTHON)"; \
	[ -z "$(PYSPARK)" ] || $(UV_HERE) $(UV) pip install --quiet --python $$place/bin/python 'pyspark[pipelines]==$(PYSPARK).*'; \
	$$place/bin/python -c 'import platform, pyspark; print("Python", platform.python_version(), "PySpark", pyspark.__version__)'; \
	$$place/bin/python -m pytest -m "not slow and not e2e" $(PARALLEL) $(ARGS)

test-slow: setup ## The tests that `make test` leaves out for their length; those that kill processes are in `make crash`
	@$(BIN)/python -m pytest -m "slow and not crash" $(PARALLEL) $(ARGS)

e2e: setup ## The dashboard in a real Chromium, with screenshots in build/e2e (ARGS='--shots docs/images': those of the documents)
	@.tools/bin/python tools/assets.py
	@found="$$SLUICEWAY_TEST_CHROMIUM"; \
	for name in chromium chromium-browser google-chrome; do [ -n "$$found" ] || found=$$(command -v "$$name" || true); done; \
	if [ -z "$$found" ] && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	elif [ -z "$$found" ]; then \
		echo "make e2e: no Chromium was found. Install one (on Debian: apt-get install chromium) or name it in SLUICEWAY_TEST_CHROMIUM." >&2; \
		exit 1; \
	fi
	@# What measures is alone on the machine. 5: ARGS had none of those.
	@$(BIN)/python -m pytest tests/e2e -m e2e --ignore tests/e2e/test_cost.py -n $(or $(JOBS),2) $(ARGS) || [ $$? -eq 5 ]
	@$(BIN)/python -m pytest tests/e2e/test_cost.py -m e2e -rP $(ARGS) || [ $$? -eq 5 ]

lint: setup ## Style, types and the floors
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo

# Needs actionlint, or Go to build it.
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
lint-workflows: ## Check .github/workflows with actionlint
	@if command -v actionlint >/dev/null; then actionlint; else go run $(ACTIONLINT); fi

image: setup ## Build the container image, with podman or docker (ARGS='--base packages': on a base of Debian's packages, as root)
	@$(BIN)/python tools/image.py build $(ARGS)

# podman needs no daemon. mmdebstrap makes the base image, as registries of images may be out of reach.
test-image: setup ## Build the container image and run it: first hour, TLS, read-only root, stop, the chart's pods (as root)
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		for name in podman buildah runc mmdebstrap; do command -v $$name >/dev/null || missing="$$missing $$name"; done; \
		[ -z "$$missing" ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; }; \
	fi
	@$(BIN)/python tools/image_tour.py $(ARGS)

test-chart: setup ## Lint, render and validate the Helm chart (builds Helm with Go if there is none)
	@$(BIN)/python tools/chart.py

# Not a part of `make test`, as it needs the network: it asks the package index about each version that the lock file names, and fails if it
# gets no answer about one.
audit: sbom secrets ## Known vulnerabilities of the locked dependencies, secrets in the history, and the bill of materials (CycloneDX) in dist/
	@$(UV_HERE) UV_PROJECT_ENVIRONMENT=.tools/audit $(UV) sync --locked --only-group audit --quiet --python .tools/bin/python
	@.tools/audit/bin/pip-audit --strict --requirement build/requirements.txt --require-hashes --disable-pip $(ARGS)

secrets: $(UV) ## Look for secrets in the files of the repository, and in all that its history has
	@.tools/bin/python tools/secret_scan.py --history

sbom: $(UV) ## The bill of materials (CycloneDX) in dist/
	@mkdir -p build dist
	@$(LOCKED) --format cyclonedx1.5 --output-file dist/sluiceway.cdx.json
	@$(LOCKED) --output-file build/requirements.txt

sizes: $(UV) ## What an installation takes, by package (ARGS=--write: into docs/project/dependencies.md)
	@.tools/bin/python tools/installed_size.py $(ARGS)

# The tools are in an environment of their own. The files have the time of the commit, so that two builds of it are the same.
RELEASE := ../.tools/release/bin/python
dist: $(UV) $(ASSETS) ## Both wheels and source distributions in dist/, checked as an index does
	@.tools/bin/python tools/release.py --check $(if $(TAG),--tag $(TAG))
	@rm -f dist/*.whl dist/*.tar.gz
	@$(UV_HERE) UV_PROJECT_ENVIRONMENT=.tools/release $(UV) sync --locked --only-group release --quiet --python .tools/bin/python
	@export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}; \
	.tools/release/bin/python -m hatchling build --directory dist && cd client && $(RELEASE) -m hatchling build --directory ../dist
	@.tools/release/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz

# All that .github/workflows/release.yml runs but the attestations and the upload.
release-check: dist sbom sizes ## What the release workflow does, without publishing: build, check, install into new environments, use (PYTHONS='python3.12 …')
	@.tools/bin/python tools/smoke.py $(PYTHONS)
	@.tools/bin/python tools/smoke.py --lowest

$(DOCS_STAMP): pyproject.toml uv.lock | $(UV)
	@$(UV_HERE) UV_PROJECT_ENVIRONMENT=.tools/docs $(UV) sync --locked --only-group docs --quiet --python .tools/bin/python
	@touch $@

docs: setup $(DOCS_STAMP) ## The documentation as a site, in build/site; a broken link or anchor is an error
	@$(BIN)/python tools/docs_site.py .tools/docs/bin/zensical

docs-serve: setup $(DOCS_STAMP) ## The same at http://localhost:8000; run it again after a change
	@$(BIN)/python tools/docs_site.py .tools/docs/bin/zensical serve

explore: setup ## The property tests on examples that no run has seen
	@HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "not slow" $$(grep -rlE '^(from|import) hypothesis' tests --include='test_*.py') $(ARGS)

bench: setup $(BENCH_STAMP) ## Measure, side by side with the peers that are installed (ARGS='--cases single-cycle-c64 --rounds 3': some of it)
	@$(BIN)/python -m bench $(ARGS)

bench-peers: setup $(BENCH_STAMP) ## Install the peers of `make bench`, also the task queues of its case `workers`, and try each on loopback
	@$(BIN)/python -m bench peers $(ARGS)

bench-scale: setup ## What size costs: long lines, single leases, mass expiry, many partitions, queues, keys, many that wait (about an hour)
	@$(BIN)/python -m bench hard
	@$(BIN)/python -m bench growth
	@$(BIN)/python -m bench hung
	@$(BIN)/python -m bench odd_shapes

campaign: setup ## Black-box: load and every kind of fault on each storage, a history with checkers, pictures in build/campaign (ARGS=planted: find planted bugs)
	@$(BIN)/python -m tests.campaigns.blackbox $(ARGS)

soak: setup ## Half load for long with random faults: memory, handles, files and latencies over time, in build/soak (MINUTES=120; ARGS=planted: find planted leaks)
	@MINUTES=$(or $(MINUTES),10) $(BIN)/python -m tests.campaigns.soak $(ARGS)

crash: setup ## Kill real processes in mid-work and check that nothing is lost (ROUNDS=n: as often)
	@$(BIN)/python $(if $(ROUNDS),-m tests.campaigns.crash $(ROUNDS),-m pytest -m crash) $(ARGS)

test-backup: setup ## Back up a real server under load and with kills, restore, compare with a ledger (ROUNDS=n: 11 n backups; ARGS='--target s3')
	@$(BIN)/python -m tests.server.backup_campaign $(or $(ROUNDS),20) $(ARGS)

test-cluster: setup ## Kill, freeze, cut off and stop instances of real clusters under load (ARGS='kills --seconds 30': some of it)
	@$(BIN)/python -m tests.campaigns.cluster $(ARGS)

test-bucket: setup ## Partitions in a bucket: suites, specification, 10,000 simulated histories, clusters and rebalances under load (ARGS='kills --seconds 30': of that)
	@$(BIN)/python -m tests.servers.versity_server
	@$(BIN)/python -m tests.servers.azurite_server
	@$(BIN)/python -m tests.servers.fake_gcs_server
	@$(BIN)/python -m pytest -q tests/storage/test_bucket_*.py tests/storage/test_object_stores.py tests/storage/test_conformance_stores.py -k 'Bucket or bucket or object'
	@$(BIN)/python -m spec bucket --bound owners=3 --bound heads=2
	@$(BIN)/python -m simulation --bucket --seeds $(or $(SEEDS),10000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m tests.campaigns.bucket $(ARGS)
	@[ -n "$(ARGS)" ] || $(BIN)/python -m tests.campaigns.rebalance --bucket together order kills --queue orders --items 3000

test-keys: setup ## Order with a million keys, kills and failures; limits and rates; a flood beside a quiet key (ARGS='order --keys 10000': some of it)
	@$(BIN)/python -m tests.campaigns.keys $(ARGS)

test-members: setup ## Let a hundred processes of one group join, die and freeze (ARGS='--members 150': more of them)
	@$(BIN)/python -m tests.campaigns.members $(ARGS)

test-rebalance: setup ## Add, remove and move partitions of real servers under load, and kill them at every step (ARGS='order copies': some of it)
	@$(BIN)/python -m tests.campaigns.rebalance $(ARGS)

test-tasks: setup ## Simulated schedules, and captures of real streams whose tasks are killed and frozen (ARGS='schedules --seeds 2000': some of it)
	@$(BIN)/python -m tests.campaigns.tasks $(ARGS)

test-upgrade: setup ## Upgrade a cluster and a server under load, there and back, with kills in between (ARGS='single --rounds 4': some of it)
	@$(BIN)/python -m tests.campaigns.upgrade $(ARGS)

test-spark: setup ## Kill drivers, tasks and servers at every stage of real Spark queries, with a ledger over the sinks (ARGS='kills --rounds 1': some of it)
	@$(BIN)/python -m tests.campaigns.spark $(ARGS)

test-spark-versions: setup ## The Spark tests with other versions (PYTHONS='python3.12 python3.13' PYSPARKS='4.2 4.3'; PYSPARKS alone: this Python)
	@$(BIN)/python -m tests.campaigns.spark versions $(PYTHONS:%=--python %) $(PYSPARKS:%=--pyspark %) $(ARGS)

# An environment of its own: these take half a gigabyte that no other test needs.
test-engines: $(UV) $(ASSETS) ## Polars, DuckDB, pandas, Daft and Ray Data on leased items, with killed workers, in build/engines (TORCH=1: PyTorch, too, of 5 GB)
	@$(UV_HERE) UV_PROJECT_ENVIRONMENT=build/engines $(UV) sync --locked --all-extras --group engines $(if $(TORCH),--group torch) --quiet --python .tools/bin/python
	@SLUICEWAY_TEST_ENGINES=daft,ray$(if $(TORCH),$(COMMA)torch) build/engines/bin/python -m pytest tests/engines $(ARGS)

test-incidents: setup ## Stage incidents on a real server: each is named within 15 s, and a healthy run (MINUTES=1) names none
	@MINUTES=$(or $(MINUTES),1) $(BIN)/python -m tests.campaigns.incidents $(ARGS)

fuzz: setup ## 400,000 damaged bodies, and 30,000 requests made from the OpenAPI document (ARGS='--seed 1': the same again)
	@$(BIN)/python -m tests.fuzz.decoders 100000 $(ARGS)
	@$(BIN)/python -m tests.fuzz.openapi_requests 30000 $(ARGS)

fuzz-coverage: setup $(FUZZ_STAMP) ## Coverage-guided fuzzing of each decoder of what comes from outside (SECONDS=60 for each; ARGS='arrow peer': of those)
	@$(BIN)/python -m tests.fuzz.guided --seconds $(or $(SECONDS),60) $(ARGS)

hostile: setup ## Attack a real server in some forty ways while others are to be served
	@$(BIN)/python -m pytest tests/hostile -rP $(ARGS)

sim: setup ## Random histories in a simulated world (SEEDS=200, FIRST=0, JOBS=1; ARGS=--keys, --cluster, --rebalance …: of one kind only)
	@$(BIN)/python -m simulation --seeds $(or $(SEEDS),200) --first $(or $(FIRST),0) --jobs $(or $(JOBS),1) $(ARGS)

spec: setup ## Check the specifications exhaustively within bounds, and that none of their rules can be left out (ARGS='fences --bound items=2': that one)
	@$(BIN)/python -m spec --jobs $(or $(JOBS),2) $(ARGS)

spec-histories: setup ## Check that recorded histories are ones of the specifications: simulated ones (SEEDS=1000; of removals and keys 100), of real servers and of real groups (SERVERS=25)
	@$(BIN)/python -m spec.histories --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind groups --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind members --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind buckets --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind tasks --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind removal --seeds $(or $(SEEDS),100) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m spec.histories --kind keys --seeds $(or $(SEEDS),100) --jobs $(or $(JOBS),2)
	@$(BIN)/python -m tests.spec.real_histories $(or $(SERVERS),25)
	@$(BIN)/python -m tests.spec.real_groups $(or $(SERVERS),25)

sim-bank: setup ## Plant each bug of the bank and see that the simulator finds it (JOBS=1)
	@$(BIN)/python -m simulation --bank --jobs $(or $(JOBS),1) $(ARGS)

clean: ## Remove everything that make built
	@rm -rf .venv .tools build dist $(VENDOR) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src simulation spec bench tests conformance tools -name __pycache__ -type d -prune -exec rm -rf {} +
