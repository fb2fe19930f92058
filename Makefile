# All that one does here with one word. `make` alone lists the words.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-two-hosts demo-expert-parallel demo-sweep train test test-slow bench lint format clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 24

setup: ## make .venv: vLLM for CPU, tests and tools; minutes the first time, nothing after that
	@$(PYTHON) tools/set_up.py $(VENV)

demo: setup ## generate with and without dual-batch overlap, compare and time them
	$(BIN)/python examples/offline_dualbatch_overlap_npu.py

demo-two-hosts: setup ## the same over a slow link between two hosts, which it makes of network namespaces (root)
	$(BIN)/python examples/two_hosts.py

demo-expert-parallel: setup ## the same where each host has prompts of its own and half of the experts (root)
	$(BIN)/python examples/two_hosts.py --parallel data-expert

train: setup ## train the tiny DeepSeek model that the demos serve
	$(BIN)/python examples/train_tiny_deepseek.py

test: setup ## run the tests, but for the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup ## run the slow tests: the examples, served models, large layouts, the planner's grid
	$(BIN)/python -m pytest -m slow

demo-sweep: setup ## auto against off and always over link rates and prompt lengths; about 20 minutes (root)
	$(BIN)/python examples/sweep_rates.py

bench: setup ## run the benchmarks
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -q -s

lint: setup ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup ## rewrite the code in the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and all caches
	rm -rf $(VENV) build dist *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
