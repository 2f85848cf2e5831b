# Every target does the set-up that it needs; `make` alone lists them.
# A fresh Debian machine needs: apt-get install make python3-venv

EXTRAS ?= torch,dev
# Of run-%: torch or mock in place of what the topology says, or trtllm, which has topologies of its own.
ENGINE ?=
# TensorRT-LLM comes with its container: the environment is made on top of what that has.
ifeq ($(ENGINE),trtllm)
export SITE_PACKAGES := 1
EXTRAS :=
endif
# Three keep two cores busy: tests wait now and then. Each imports torch, which takes memory and seconds of CPU.
JOBS ?= 3
# A file's tests share what it has started; tests/conftest.py says in which order.
# Compiled code is kept, whatever the environment says: pytest takes seconds to rewrite the assertions of all files.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup tools test test-unit test-bench test-chaos test-long test-trtllm test-clients test-deploy bench lint lint-rest lint-format lint-code lint-types lint-imports lint-protos \
  lint-stubs lint-go lint-typescript node generate format release-protos clean

help:  ## List the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-16s %s\n", $$1, $$2 }'

setup:  ## Make .venv with all that Quartet needs (EXTRAS=dev: without torch)
	@tools/setup.sh "$(EXTRAS)"

tools: setup  ## Get etcd and grpcurl, where the machine lacks them
	@tools/binaries.sh

node:  ## Get what the TypeScript client needs, where there is Node
	@tools/node.sh

run-epd: run-epd_multimodal_image  ## Encode, Prefill and Decode, for pictures
	@:

run-%: setup tools  ## Start configs/%.yaml on this machine: run-disagg, run-agg; ENGINE=trtllm: configs/trtllm/%.yaml (ARGS="--router-port 0")
	@exec $(BIN)/quartet up $(if $(filter trtllm,$(ENGINE)),configs/trtllm,configs)/$*.yaml \
	  $(if $(filter-out trtllm,$(ENGINE)),--engine $(ENGINE)) $(ARGS)

run-gpu-%: setup tools  ## Start configs/gpu/%.yaml on this machine's GPUs: run-gpu-agg, run-gpu-disagg (ARGS=...)
	@exec $(BIN)/quartet up configs/gpu/$*.yaml $(ARGS)

test: setup tools node  ## Run all tests but those of test-bench, test-chaos, -trtllm, -clients and -deploy (JOBS=4: that many at once)
	$(PYTEST) -m "not chaos and not bench and not trtllm and not clients and not deploy"

test-unit: setup tools  ## Run the tests that start no service processes
	$(PYTEST) -m "not e2e and not chaos and not bench"

test-bench: setup tools  ## Have benchmarks measure real servers, shortly; about 2 minutes
	@tools/schema_suite.sh || true
	$(PYTEST) -m bench tests/benchmarks

test-chaos: setup tools  ## Attack a fleet: faults, hostile inputs, hostile tenants; about 3 minutes
	$(PYTEST) -m chaos tests/chaos

test-long: setup tools  ## Run what test-bench and test-chaos run at once, as the gate does; about 4 minutes
	@tools/schema_suite.sh || true
	$(PYTEST) -m "bench or chaos" tests/benchmarks tests/chaos

test-trtllm: setup tools  ## Start each topology for TensorRT-LLM on its stand-in, as 1.2 and as 1.4, and disturb some; about 2 minutes
	$(PYTEST) --dist load -m trtllm tests/e2e/test_trtllm_topologies.py tests/e2e/test_trtllm.py \
	  tests/cli/doctor/test_live.py
	$(PYTEST) -m trtllm tests/e2e/test_trtllm_chaos.py

test-clients: setup tools  ## Drive HTTP with aiperf and guidellm, in environments of their own (7 GB); about 2 minutes
	@tools/clients.sh
	$(PYTEST) -m clients tests/e2e/test_clients.py

test-deploy: setup tools  ## A real Prometheus on a fleet: alerts fire; pip in an empty environment; two hosts, one vanishes (root); about 8 minutes
	@tools/prometheus.sh
	$(PYTEST) -m deploy tests/deploy tests/e2e/test_deploy.py tests/e2e/test_installed.py tests/e2e/test_two_hosts.py

bench: setup  ## Run all benchmarks' short forms and fill docs/performance.md from them (about 7 minutes)
	$(BIN)/python -m benchmarks

lint: lint-types lint-rest  ## Run every check of the gate

# What takes seconds; the gate begins with it, and checks types beside its tests.
lint-rest: lint-format lint-code lint-imports lint-protos lint-stubs lint-go lint-typescript

lint-format: setup
	$(BIN)/ruff format --check .

lint-code: setup
	$(BIN)/ruff check .

lint-types: setup
	$(BIN)/python -m mypy

lint-imports: setup
	$(BIN)/lint-imports --no-logo

lint-protos: setup
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

lint-stubs: setup node
	$(BIN)/python -m codegen.generate --check
	$(BIN)/python -m codegen.dashboards --check

lint-go:
	@tools/lint_go.sh

# What it makes on the way, in clients/typescript/dist, is what tests run.
lint-typescript: node
	@tools/node.sh tsc

generate: setup node  ## Generate stubs from protos/ (Go's and TypeScript's, where there are Go and Node), and deploy/grafana from codegen/dashboards.py
	$(BIN)/python -m codegen.generate
	$(BIN)/python -m codegen.dashboards

format: setup  ## Format the code and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release-protos: setup  ## Make today's contracts the ones that must not break (needs a line in CHANGELOG.md)
	$(BIN)/buf build -o protos/released.binpb

clean:  ## Delete what was made here: .venv, .tools, .run, caches
	rm -rf .venv .tools .run clients/typescript/node_modules clients/typescript/dist build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
