# All that one does here with one word. `make` alone lists the words.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NPU ?= auto
ASCEND ?= auto
# ASCEND is `auto`, `required`, or a release of vllm-ascend other than the one in tools/set_up.py.
ASCEND_VERSION := $(filter-out auto required,$(ASCEND))
ASCEND_NEED := $(if $(ASCEND_VERSION),required,$(ASCEND))
ASCEND_TESTS := $(if $(ASCEND_VERSION),$(shell cat tests/ascend/releases/$(ASCEND_VERSION).tests),tests/ascend)
VLLM ?= 0.32.0
COMPAT_OPTIONS ?= --write
NPU_BIN := $(VENV)-npu/bin
ASCEND_VENV := $(VENV)-ascend$(if $(ASCEND_VERSION),-$(ASCEND_VERSION))
ASCEND_BIN := $(ASCEND_VENV)/bin
COMPAT := $(VENV)-compat/$(VLLM)
CUDA_BIN := $(VENV)-cuda/bin
# Of chosen files, none may have a slow test that needs root, or none that does not: pytest then ends with 5.
OR_NONE = || test $$? -eq $(if $(SLOW_TESTS),5,0)
KIT_SITE := .gpu_kit_cache/site
NPU_TESTS_SLOW ?= tests/standin/cann
NPU_SUITES := tests/standin/cann tests/devices tests/lab/doctor/test_torch_npu.py tests/engine/test_executor.py
# Each process of pytest-xdist imports torch and vLLM by itself: more than eight gain nothing, however many cores there are.
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# Files that start engines stay whole, for these are shared in a file. Engines have processes and memory of their own.
PARALLEL_FILES := -n 2 --dist loadfile --no-loadscope-reorder

# Some images forbid Python to keep what it compiled. vLLM's import, which each process of an engine repeats, then takes
# 25 s of a core in place of 16.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-npu setup-ascend setup-cuda gpu-kit demo demo-vl demo-two-hosts demo-expert-parallel demo-disaggregated demo-sweep \
	train test test-npu test-npu-slow test-ascend test-ascend-slow test-gpu-kit count-recipes verdicts test-upstream gpu-kit-rehearsal hardware test-compat record-adapters test-slow test-shards test-all test-nightly bench bench-two-hosts try-registry planted-faults false-alarms faults soak mutants fuzz growth docs site dashboard dist release lint format clean

help: ## list the words, those for every day first
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 24
	@echo "more words:"
	@sed -nE 's/^([a-z-]+):.*##\+ (.*)/  \1\t\2/p' Makefile | expand -t 24

setup: ## make .venv: vLLM for CPU, tests and tools; minutes the first time, nothing after that
	@$(PYTHON) tools/set_up.py $(VENV)

setup-npu: ##+ make .venv-npu: torch_npu and tests, without vLLM
	@$(PYTHON) tools/set_up.py --npu $(VENV)-npu

setup-ascend: ##+ make .venv-ascend: torch_npu, vLLM and vllm-ascend without its C++; or of ASCEND=0.23.0.post1
	@$(PYTHON) tools/set_up.py $(ASCEND_VENV) --ascend $(ASCEND_VERSION)

setup-cuda: ##+ make .venv-cuda: what the machine with a GPU has that takes the GPU kit, torch for CUDA above all (5 GB)
	@$(PYTHON) tools/set_up.py --cuda $(VENV)-cuda

gpu-kit: ##+ build .gpu_kit: vLLM for CUDA, cut to one GPU's code, for a machine without network (minutes); see docs/devices.md
	@$(PYTHON) -m tools.gpu_kit.build

demo: setup ## generate with and without dual-batch overlap, compare and time them
	$(BIN)/python examples/offline_dualbatch_overlap_npu.py

demo-vl: setup ##+ the same with a multimodal model: its vision encoder is split, too
	$(BIN)/python examples/offline_dualbatch_overlap_npu.py --pictures

demo-two-hosts: setup ##+ the same over a slow link between two hosts, which it makes of network namespaces (root)
	$(BIN)/python examples/two_hosts.py

demo-expert-parallel: setup ##+ the same where each host has prompts of its own and half of the experts (root)
	$(BIN)/python examples/two_hosts.py --parallel data-expert

demo-disaggregated: setup ##+ prefill on one server, split, and decode on another, which reads its KV cache by NIXL
	$(BIN)/python examples/disaggregated.py

train: setup ##+ train the tiny DeepSeek model that the demos serve, and its drafters
	$(BIN)/python examples/train_tiny_deepseek.py
	$(BIN)/python examples/train_tiny_drafters.py mtp
	$(BIN)/python examples/train_tiny_drafters.py eagle3

test: setup ## run the tests but for the slow ones, and those of the NPU where their environment can be made
	$(BIN)/python -m pytest -m "not slow and not vllm and not cuda_build" $(PARALLEL)
	$(BIN)/python -m pytest -m "not slow and vllm and not cuda_build" $(PARALLEL_FILES)
	@if $(MAKE) setup-npu; then $(MAKE) test-npu; \
	elif [ $(NPU) = required ]; then exit 1; \
	else echo "test: left out the tests on torch_npu: their environment cannot be made, see above"; fi

test-npu: setup-npu ##+ run the tests of devices on the real torch_npu, over a stand-in for CANN (g++); see NPU=required
	NPU_TESTS=$(NPU) $(NPU_BIN)/python -m pytest $(NPU_SUITES) -m "not slow" $(PARALLEL_FILES)

test-npu-slow: setup-npu ##+ run the slow ones of them
	NPU_TESTS=required $(NPU_BIN)/python -m pytest $(NPU_TESTS_SLOW) -m slow $(PARALLEL_FILES)

test-ascend: ##+ run the tests inside the real vllm-ascend, over a stand-in for CANN (g++); see ASCEND=required, and ASCEND=0.23.0.post1
	@if $(MAKE) setup-ascend; then \
		NPU_TESTS=$(ASCEND_NEED) $(ASCEND_BIN)/python -m pytest $(ASCEND_TESTS) -m "not slow" $(PARALLEL_FILES) \
			$(ASCEND_OPTIONS); \
	elif [ $(ASCEND_NEED) = required ]; then exit 1; \
	else echo "test-ascend: left out: its environment cannot be made, see above"; fi

test-ascend-slow: setup-ascend ##+ run the slow ones of them: every model, quantized weights, drafters, all-to-all
	NPU_TESTS=required $(ASCEND_BIN)/python -m pytest $(ASCEND_TESTS) -m slow $(PARALLEL_FILES) $(SLOW_OPTIONS)

test-gpu-kit: setup-cuda gpu-kit ##+ run vLLM's CUDA build from the GPU kit as far as that goes without a GPU (gcc)
	PYTHONPATH=$$($(CUDA_BIN)/python -m tools.gpu_kit.unpack $(KIT_SITE)) \
		$(CUDA_BIN)/python -m pytest tests/gpu_kit -m cuda_build $(KIT_OPTIONS)

count-recipes: setup-ascend ##+ count which commands of vllm-ascend's tutorials would be split, for docs/ascend.md (minutes)
	$(ASCEND_BIN)/python -m tests.ascend.count_recipes

verdicts: setup-ascend ##+ compare the doctor's verdict on each form of these commands with what a tiny model of it does (an hour)
	NPU_TESTS=required $(ASCEND_BIN)/python -m pytest tests/ascend/test_verdicts.py -m slow --all-forms $(VERDICT_OPTIONS)

test-upstream: setup-ascend ##+ run vllm-ascend's own unit tests with overlap switched on and off, for docs/ascend.md (an hour)
	$(ASCEND_BIN)/python -m tests.ascend.upstream_tests

gpu-kit-rehearsal: setup ##+ run the kit for machines with a GPU without one: on vLLM's CPU build, and over the stand-in where it can be set up
	$(BIN)/python -m tools.gpu_kit.rehearse --device cpu
	@if $(MAKE) setup-npu; then $(NPU_BIN)/python -m tools.gpu_kit.rehearse --device npu; \
	elif [ $(NPU) = required ]; then exit 1; \
	else echo "gpu-kit-rehearsal: left out the stand-in: its environment cannot be made, see above"; fi

hardware: setup ##+ store what a GPU has shown, RESULTS=results.json, and write docs/hardware.md and the list of evidence
	$(BIN)/python -m tools.gpu_kit.page $(RESULTS)

test-compat: ##+ run the suites that touch vLLM on another version, VLLM=0.32.0; `make docs` writes the outcome
	@$(PYTHON) tools/set_up.py --vllm $(VLLM) $(COMPAT)
	$(COMPAT)/bin/python tools/compat_suites.py $(COMPAT_OPTIONS)

record-adapters: setup ##+ record each adapter on the classes of another version, VLLM=0.33.0; `make docs` writes the outcome
	PYTHONPATH=$$($(BIN)/python tools/vllm_classes.py $(VLLM)) $(BIN)/python -m tests.compat.recorded --write

test-slow: setup ##+ run the slow tests: the examples, served models, large layouts, the planner's grid
	$(BIN)/python -m pytest $(SLOW_TESTS) -m "slow and not root and not cuda_build" $(PARALLEL_FILES) $(SLOW_OPTIONS) $(OR_NONE)
	$(BIN)/python -m pytest $(SLOW_TESTS) -m "slow and root" $(SLOW_OPTIONS) $(OR_NONE)

test-shards: ## run the long tests that CI would choose, or SHARDS="families lora", and note in tests/ledger.json what passed
	@$(PYTHON) -m tools.shards run $(SHARDS)

test-all: ## run all tests and shards, long ones too, and note in tests/ledger.json what passed (hours)
	$(MAKE) test NPU=required
	@$(PYTHON) -m tools.shards run --all

test-nightly: setup ##+ run the tests that start no engine with many more examples of each property
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "not vllm and not cuda_build" $(PARALLEL)

soak: setup ##+ answer 5,000 random requests split and unsplit, and compare; writes docs/reliability.md
	$(BIN)/python -m tests.reliability.traffic --write-page

mutants: setup ##+ try mutants of the core's modules: mistakes that its tests must notice; writes docs/reliability.md (minutes)
	$(BIN)/python -m tools.mutants --write-page $(MUTANTS_OPTIONS)

demo-sweep: setup ##+ auto against off and always over link rates and prompt lengths; about 20 minutes (root)
	$(BIN)/python examples/sweep_rates.py

bench: setup ## run the benchmarks that need one host; docs/benchmarks.md names those that write it
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -q -s \
		--ignore tests/benchmarks/bench_two_hosts.py --ignore tests/benchmarks/bench_serving.py \
		--ignore tests/benchmarks/bench_step_time.py \
		--ignore tests/benchmarks/bench_prefill_node.py
	@if $(MAKE) setup-npu; then $(NPU_BIN)/python -m pytest tests/benchmarks/bench_streams.py -q -s; fi

bench-two-hosts: setup ##+ measure overlap between two hosts, serving over them, and step times; two hours (root); writes docs/benchmarks.md
	$(BIN)/python -m tests.benchmarks.bench_two_hosts --write-page
	$(BIN)/python -m tests.benchmarks.bench_serving --write-page
	$(BIN)/python -m tests.benchmarks.bench_step_time --write-page
	$(BIN)/python -m tests.benchmarks.bench_prefill_node --write-page

fuzz: setup ##+ give every reader of files, settings and adapters 20,000 bad inputs, and write docs/reliability.md (an hour)
	$(BIN)/python -m tests.reliability.bad_input --write-page

growth: setup ##+ serve 30 minutes of mixed load, plan 100,000 batches, and write what stays to docs/reliability.md
	$(BIN)/python -m tests.reliability.growth --write-page

try-registry: setup ##+ serve a tiny model of each text architecture that vLLM has, split and unsplit; writes docs/models.md (an hour)
	$(BIN)/python -m tests.registry.coverage --write-page

false-alarms: setup-ascend ##+ cut 2,000 random steps under DBO_CHECK=1 inside vllm-ascend, for docs/reliability.md (half an hour)
	$(ASCEND_BIN)/python -m tests.ascend.false_alarms --write-page

planted-faults: setup ##+ plant faults into schedules, ranks, adapters and metadata, and write docs/reliability.md (minutes)
	$(BIN)/python -m tests.reliability.planted_faults --write-page

faults: setup ##+ kill, stop, fill and cut off real servers under load, split and not; an hour (root); writes docs/reliability.md
	$(BIN)/python -m tests.reliability.faults --write-page

docs: setup ## write the tables of README.md and docs/ that come from code
	$(BIN)/python tools/write_docs.py

site: setup ## build the documentation site into build/site, and check its links and anchors
	$(BIN)/mkdocs build

dashboard: setup ##+ write examples/monitoring/dashboard.json (Python 3.11 or newer, for Grafana's SDK)
	$(BIN)/python tools/dashboard.py

dist: setup ## build the packages of the last commit into dist/, check them, and try them out in empty environments; PROJECT_URL=https://...
	$(BIN)/python -m tools.distribution

release: setup ##+ the same of a tagged and dated commit: all but the upload, whose command it prints
	$(BIN)/python -m tools.distribution --release

lint: setup ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup ## rewrite the code in the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and all caches
	rm -rf $(VENV) $(VENV)-npu $(VENV)-ascend* $(VENV)-compat $(VENV)-cuda .gpu_kit build dist *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
