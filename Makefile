# One line each, the same commands CI runs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 3
SUITE := tests/pure tests/abuse tests/cpu tests/media tests/server tests/clients
PARALLEL := -n $(JOBS) --dist loadscope --no-loadscope-reorder
LOWER_ISA := $(shell grep -qs avx512f /proc/cpuinfo && echo avx2 || echo sse2)
SETUP := $(VENV)/.ready
CPU_TORCH := $(shell command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)

.PHONY: help setup run fmt check pure cpu server browser gpu test test-long isa bench docs clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
ifneq ($(CPU_TORCH),)
	@echo "no nvidia-smi here: installing torch's CPU build"
	@$(BIN)/python -m pip install -q torch -c constraints.txt --retries 0 --index-url $(CPU_TORCH) 2>/dev/null \
	|| echo "$(CPU_TORCH) cannot be used: installing torch from the default index"
endif
	$(BIN)/python -m pip install -q torch -c constraints.txt
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	touch $(SETUP)

setup: $(SETUP) ## make .venv with everything for developing

run: $(SETUP) ## serve the embedded model on http://127.0.0.1:8000
	$(BIN)/quire serve

fmt: $(SETUP) ## format and fix what can be fixed
	$(BIN)/ruff format quire tests bench tools examples && $(BIN)/ruff check --fix -q quire tests bench tools examples

check: $(SETUP) ## format, lint, types, layers, spelling, sizes, forbidden calls, names and words
	$(BIN)/ruff format --check -q quire tests bench tools examples deploy
	$(BIN)/ruff check -q quire tests bench tools examples deploy
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell quire tests bench tools docs examples deploy README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/python tools/size.py --check
	$(BIN)/python tools/gate.py
	$(BIN)/python tools/words.py

pure: $(SETUP) ## tests that need Python only
	$(BIN)/pytest $(PARALLEL) tests/pure

cpu: $(SETUP) ## tests that need torch on the CPU
	$(BIN)/pytest $(PARALLEL) tests/cpu

server: $(SETUP) ## tests of the server on loopback, with real clients
	$(BIN)/pytest tests/server tests/clients tests/abuse

browser: $(SETUP) ## drive the page in a headless Chromium (needs the extra `browser`)
	$(BIN)/pytest tests/browser

gpu: $(SETUP) ## tests that need a GPU
	$(BIN)/pytest tests/gpu

test: $(SETUP) ## the whole CPU suite in JOBS=3 processes; the longest tests go to build/durations.txt
	$(BIN)/pytest $(PARALLEL) $(SUITE)

test-long: $(SETUP) ## the same with many more rounds and generated cases: hours
	$(BIN)/pytest $(PARALLEL) --long --timeout 7200 $(SUITE)

isa: $(SETUP) ## tests of C++ code and models one instruction set below this CPU's
	QUIRE_CPU_ISA=$(LOWER_ISA) ATEN_CPU_CAPABILITY=$(LOWER_ISA:sse2=default) \
	ONEDNN_MAX_CPU_ISA=$(patsubst sse2,SSE41,$(LOWER_ISA:avx2=AVX2)) \
	$(BIN)/pytest $(PARALLEL) tests/cpu/kernels tests/cpu/models tests/cpu/attention tests/media/test_resize.py
	$(BIN)/pytest --long -k "lesser or instruction_sets" tests/cpu/kernels tests/media/test_resize.py

bench: $(SETUP) ## quick figures of this machine: scheduler, ops, sampler, offline
	$(BIN)/python bench/scheduler.py && $(BIN)/python bench/ops.py && $(BIN)/python bench/sampler.py

docs: $(SETUP) ## check the documents that the tests check
	$(BIN)/pytest tests/pure/test_docs.py

clean: ## remove the venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
