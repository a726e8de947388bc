# Every target but help and clean makes its CPU environment first (tools/setup_cpu_env.py, for SGLang
# tools/setup_sglang_env.py); once it is there that takes less than a second. With a GPU: see
# CONTRIBUTING.md.

PYTHON ?= python3.11
VENV ?= .venv
COMPAT ?= 0.29.0
BIN = $(VENV)/bin
SGLANG_VENV ?= .venv-sglang

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-trainers compat setup-sglang demo-sglang test-sglang lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: ## create .venv with vLLM's CPU build, this project and its tools
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) not found: install Python 3.11, or say where it is: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@$(PYTHON) tools/setup_cpu_env.py --venv $(VENV)

demo: setup ## serve a small model through quads_nvfp4 and ask it a few questions (ARGS=...)
	@$(BIN)/python examples/demo.py $(ARGS)

test: setup ## run the tests (ARGS="-k name" picks some)
	$(BIN)/python -m pytest $(ARGS)

test-trainers: ## run the tests with TRL's, verl's and OpenRLHF's own code, in .venv-trainers
	@$(PYTHON) tools/setup_trainer_env.py
	.venv-trainers/bin/python -m pytest tests/trainers tests/mismatch $(ARGS)

compat: ## run the sync and sharding tests on the vLLM that OpenRLHF pins (COMPAT=0.29.0)
	@$(PYTHON) tools/setup_cpu_env.py --venv .venv-compat --engine $(COMPAT)
	.venv-compat/bin/python -m pytest tests/vllm/test_weight_sync.py tests/vllm/test_sharding.py $(ARGS)

setup-sglang: ## create .venv-sglang with SGLang on a CPU, this project and its tools
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) not found: install Python 3.11, or say where it is: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@$(PYTHON) tools/setup_sglang_env.py --venv $(SGLANG_VENV)

demo-sglang: setup-sglang ## the demo through SGLang's HTTP server (ARGS=...)
	@$(SGLANG_VENV)/bin/python examples/demo_sglang.py $(ARGS)

test-sglang: setup-sglang ## run the tests of the SGLang plugin
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest tests/sglang tests/common/test_shards.py $(ARGS)

lint: setup ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## remove build products and caches, not the environment
	rm -rf build dist *.egg-info common/*.egg-info .cache .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
