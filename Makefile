# `make demo` runs the main job with no account and no GPU; `make test` proves that it all works.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo slurm slurm-stop test test-all test-newest test-oldest test-gpu lint docs bench gpu-day \
  gpu-day-rehearsal gpu-day-cases gpu-day-wheels gpu-day-report goldens clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two ranks on few cores: one thread each.
export OMP_NUM_THREADS ?= 1
# Tests start thousands of interpreters. Without bytecode files each of them compiles launcher anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

venv: $(STAMP) ## create .venv with every pinned dependency
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c "import torch" 2>/dev/null; then \
	  echo "setting up $(VENV) (once; torch is the large part)"; \
	  $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0; \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,tasks,float8,track,frameworks,runpod,sandbox,top,docs,dev]"
	@touch $(STAMP)

demo: venv ## train a small GPT on two ranks, run out of memory once, recover
	@$(BIN)/python examples/demo.py

slurm: venv ## a real Slurm cluster of four nodes on this machine, to try launcher on
	@bash tests/slurm/install.sh
	@$(BIN)/python -m tests.slurm.play start

slurm-stop: venv ## end it
	@$(BIN)/python -m tests.slurm.play stop

# Tests wait for a third of their time: four on two cores.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 25
test: venv ## every feature once, for real, in minutes; components that are absent are skipped with the reason
	$(PYTEST) -m "not slow and not thorough" $(ARGS)

test-all: venv ## everything: every case of every feature, any two values of a recipe together, four ranks
	$(PYTEST) $(ARGS)

test-newest: ## the README's installation with the newest versions, and its first verbs
	bash tests/versions.sh newest

test-oldest: ## the same with the oldest torch that is supported
	bash tests/versions.sh oldest

test-gpu: venv ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests $(ARGS)

lint: venv ## ruff, mypy, import-linter, shellcheck, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache  # its cache misses a file that was renamed
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tests/lint_scripts.sh

docs: venv ## the documentation site, in site/; a broken link is an error
	$(BIN)/python -m tests.docs.update_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: venv ## every benchmark, with its peer beside it; results go to benchmarks/results/
	@$(BIN)/python -c "import torchx" 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torchx
	$(BIN)/python benchmarks/cli.py --save
	$(BIN)/python benchmarks/logs.py --save
	$(BIN)/python benchmarks/verdicts.py --save
	$(BIN)/python benchmarks/train.py --save
	$(BIN)/python benchmarks/recipes.py --save
	$(BIN)/python benchmarks/compress.py --save
	$(BIN)/python benchmarks/memory.py --save
	$(BIN)/python benchmarks/memory_published.py --save
	$(BIN)/python benchmarks/oom.py --save
	$(BIN)/python benchmarks/oom_matrix.py --save
	$(BIN)/python benchmarks/slurm.py --save
	$(BIN)/python benchmarks/plans.py --save
	$(BIN)/python benchmarks/slurm_scale.py --save

# A rented machine has a Python with torch, and no network: wheels that travel in WHEELS are unpacked beside it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
WHEELS ?= .wheels
CARRIED := $(if $(wildcard $(WHEELS)/*.whl),.wheels-unpacked)
STAGE ?=
ON_PATH = $(if $(CARRIED),PYTHONPATH="$(CURDIR)/$(CARRIED)$${PYTHONPATH:+:$$PYTHONPATH}")
gpu-day: $(CARRIED) ## measure on a GPU what is predicted: STAGE=1 to 6, or all; ARGS="--seconds 570"
	@$(ON_PATH) $(GPU_PYTHON) benchmarks/gpu_day.py $(STAGE) $(ARGS)

gpu-day-rehearsal: $(CARRIED) ## the same path on the CPU, in tiny
	@$(ON_PATH) $(GPU_PYTHON) benchmarks/gpu_day.py $(STAGE) --rehearsal $(ARGS)

.wheels-unpacked: $(wildcard $(WHEELS)/*.whl)
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $@ $^
	@touch $@

gpu-day-cases: venv ## write the cases of a GPU day again, with what the planner predicts today
	$(BIN)/python benchmarks/gpu_day_cases.py $(ARGS)

gpu-day-wheels: venv ## download what a machine with torch and without a network needs, into WHEELS
	$(BIN)/python benchmarks/gpu_day_wheels.py $(WHEELS) $(ARGS)

gpu-day-report: venv ## tables of the results of a GPU day; ARGS="--save"
	@$(BIN)/python benchmarks/gpu_day_report.py $(ARGS)

goldens: venv ## write the golden files of every rendered template again
	$(BIN)/python -m tests.render.update_goldens
	$(BIN)/python -m tests.images.update_goldens

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
