# Few words: serve, demo, test, check, bench. Each makes .venv first, when it is missing or pyproject.toml is newer.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Where no NVIDIA GPU is seen and pip's own sources lack a CPU build: make TORCH_CPU_INDEX=<PyTorch's index of CPU builds>.
TORCH_CPU_INDEX ?=
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
TORCH := $(shell sed -n 's/^torch==//p' deploy/constraints-cpu.txt)
ARGS ?=
ENGINE ?=

.PHONY: serve demo test slow conformance check bench install clean

serve: $(STAMP)
	@exec $(BIN)/busway serve $(ARGS)

demo: $(STAMP)
	@exec $(BIN)/busway demo $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu and not conformance_vllm and not conformance_sglang" $(ARGS)

slow: $(STAMP)
	$(BIN)/pytest -m "slow and not gpu and not conformance_vllm and not conformance_sglang" $(ARGS)

# One suite for every engine: make conformance ENGINE=vllm (torch, sim, trtllm, vllm, sglang; without ENGINE all but vllm
# and sglang; trtllm is a stand-in of TensorRT-LLM).
conformance: $(STAMP)
ifneq ($(filter vllm sglang,$(ENGINE)),)
	deploy/engines/install.sh $(ENGINE)
endif
	nice -n 10 $(BIN)/pytest tests/conformance -k "$(or $(ENGINE),(torch or sim or trtllm) and not vllm and not sglang)" --durations=5 $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench ENGINE=vllm: the torch engine beside that engine, in turns.
bench: $(STAMP)
ifneq ($(filter vllm,$(ENGINE)),)
	deploy/engines/install.sh $(ENGINE)
endif
	$(BIN)/python -m deploy.bench $(ENGINE) $(ARGS)

install: $(STAMP)

$(STAMP): pyproject.toml deploy/constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "busway needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try make PYTHON=python3.12")'
	@echo 'Installing into .venv: a few minutes, once.'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(HAS_GPU),yes)
	$(BIN)/pip install --quiet --editable '.[torch,dev]'
else
	@# First torch, alone, from a CPU build; what comes after finds it there and leaves it.
	$(BIN)/pip install --quiet 'torch==$(TORCH)+cpu' || \
	    $(BIN)/pip install --quiet $(if $(TORCH_CPU_INDEX),--index-url $(TORCH_CPU_INDEX)) --constraint deploy/constraints-cpu.txt torch
	$(BIN)/pip install --quiet --constraint deploy/constraints-cpu.txt --editable '.[torch,dev]'
endif
	@touch $(STAMP)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
