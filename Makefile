# SPDX-License-Identifier: Apache-2.0
# Set-up, checks and studies. All of it runs in .venv, whatever environment is active.

PYTHON ?= python3
CORES ?= 2

BIN := .venv/bin
# As snakemake, but its jobs go on when the reader of the output leaves.
SNAKEMAKE := $(BIN)/python -m routeblock.workflow_run --profile workflow/profiles/default
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Every package and all that it brings along, with the digests of its files: `make lock` writes these.
LOCKED := $(PIP) --require-hashes --requirement envs/lock
LOCK := $(BIN)/uv pip compile -q --universal --generate-hashes --no-annotate --python-version 3.11 --custom-compile-command 'make lock'

# A virtual environment names its own folder: in a copied or moved checkout it would import the code of the old one.
MOVED := $(shell for env in .venv .venv-*; do [ ! -f "$$env/pyvenv.cfg" ] || \
    case "$$(grep '^command' "$$env/pyvenv.cfg")" in (*" $$(pwd -P)/$$env") ;; (*) echo "$$env" ;; esac; done)
# Snakemake needs a folder for its cache, also for a user without a home.
export XDG_CACHE_HOME := $(shell for folder in "$$XDG_CACHE_HOME" "$${HOME:+$$HOME/.cache}" .snakemake/cache; do \
    [ -n "$$folder" ] && mkdir -p "$$folder" 2>/dev/null && [ -w "$$folder" ] && cd "$$folder" && pwd && break; done)

unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX
export PYTHONNOUSERSITE := 1
export PYTHONUTF8 := 1

.PHONY: setup study report test fuzz mutants intervals growth test-recovery test-report test-slurm test-vllm check-vllm-wheels lock bundle prediction diagnosis bench verify repair clean

setup: .venv/base.stamp

ifneq ($(MOVED),)
.PHONY: moved
.venv/base.stamp .venv/dev.stamp .venv-cuda12/stamp .venv-vllm/stamp: moved
moved:
	@echo "made in another folder, so made again: $(MOVED)"
	@rm -rf $(MOVED)
endif

.venv/base.stamp: envs/lock/base.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v}; 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@$(LOCKED)/base.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev.stamp: .venv/base.stamp envs/lock/dev.txt
	@$(LOCKED)/dev.txt
	@touch $@

# CUDA 12 is the last to compile for sm_70. Its packages and CUDA 13's exclude each other.
.venv-cuda12/stamp: envs/lock/cuda12.txt
	@$(PYTHON) -m venv .venv-cuda12
	@.venv-cuda12/$(LOCKED:.venv/%=%)/cuda12.txt
	@touch $@

# After a pin in envs/*.txt was changed: what it brings along, and every digest, for each Python from 3.11 and platform.
lock: .venv/dev.stamp
	@$(LOCK) envs/base.txt envs/dev.txt envs/cuda13.txt envs/slurm.txt --output-file envs/lock/dev.txt
	@$(LOCK) envs/base.txt --constraint envs/lock/dev.txt --output-file envs/lock/base.txt
	@$(LOCK) envs/cuda12.txt --constraint envs/base.txt --output-file envs/lock/cuda12.txt
	@$(BIN)/python tests/supply_chain/licences.py

# Also after a power cut or kill -9: the jobs that were left are waited for, and what they did not finish is made again.
study: setup
	@$(BIN)/routeblock workflow check-config
	@$(BIN)/routeblock recover results
	@$(SNAKEMAKE) --cores $(CORES)

# One HTML file; where the tables are there, it is made from them.
report: setup
	@$(SNAKEMAKE) --cores $(CORES) -- report

test: .venv/dev.stamp .venv-cuda12/stamp
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/snakefmt --check Snakefile workflow
	@$(BIN)/python tests/workflow/lint.py
	@$(BIN)/pytest -n 2

# What `make test` does for a moment, for long: hostile files for every reader, mutants of every record, how often an
# interval holds the truth, how time and memory grow. Results go to fixtures/reliability.
SEED ?= 20251201
FUZZ_SECONDS ?= 600
EACH ?= 110
RESULTS := fixtures/reliability
RELIABILITY := PYTHONPATH=tests/route_block $(BIN)/python tests/reliability

fuzz: .venv/dev.stamp
	@$(RELIABILITY)/fuzz_readers.py --seconds $(FUZZ_SECONDS) --seed $(SEED) --out $(RESULTS)/fuzzed_readers.json

mutants: .venv/dev.stamp
	@$(RELIABILITY)/mutants.py --each $(EACH) --seed $(SEED) --out $(RESULTS)/mutants.json

intervals: .venv/dev.stamp
	@$(RELIABILITY)/intervals.py --trials 4000 --seed $(SEED) --out $(RESULTS)/intervals.json

growth: .venv/dev.stamp
	@$(RELIABILITY)/growth.py --out $(RESULTS)/growth.json

# A small real study is traced, edited, killed at every stage, put on a full disk; a few minutes.
test-recovery: .venv/dev.stamp
	@$(BIN)/pytest --override-ini addopts=-q tests/recovery -n 2 --dist worksteal

# The finished report in headless Chromium (Debian's package chromium; CHROMIUM=FILE names another).
test-report: .venv/dev.stamp report
	@$(BIN)/pytest --override-ini addopts=-q tests/with_chromium

# By hand, not in CI: vllm 0.24.0 with all it needs is 10 GB. No GPU is needed; on one, nothing is launched.
test-vllm: .venv-vllm/stamp
	@.venv-vllm/bin/python tests/vllm_plugin/load_plugin.py
	@.venv-vllm/bin/python tests/vllm_plugin/fused_path.py
	@.venv-vllm/bin/python -m pytest --override-ini addopts=-q tests/with_torch

# What vLLM's wheels say where the plug-in takes hold, against the committed facts; some 6 GB are downloaded, one by one.
check-vllm-wheels: setup
	@$(BIN)/python tests/vllm_plugin/read_wheels.py fixtures/published/vllm_alignment.json --check

.venv-vllm/stamp: envs/cuda.txt pyproject.toml
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --requirement envs/cuda.txt pytest
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@touch $@

# A lane through a real Slurm of one node, started and stopped here; its digests are those of `make study`, if that was run.
test-slurm: .venv/dev.stamp
	@tests/slurm/install.sh
	@timeout --kill-after=60 1800 $(BIN)/pytest --override-ini addopts=-q tests/slurm

bundle: setup
	@$(SNAKEMAKE) --cores $(CORES) bundle

# The prediction on 200 random plans at three grids; a few minutes.
prediction: setup
	@$(SNAKEMAKE) --cores $(CORES) table_prediction

# Why bits differ, what changes them, which launch made them: tables explain, witness, identify, figure explain.
diagnosis: setup
	@$(BIN)/snakemake --profile workflow/profiles/default --cores $(CORES) diagnosis

# Ratios in one run; BLAS chooses its own kernels, and idle threads of one library leave the cores to the other's.
bench: setup
	@env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OMP_WAIT_POLICY=passive $(BIN)/python bench/twin.py
	@$(BIN)/python bench/workflow.py

verify: setup
	@$(BIN)/routeblock verify results reports

repair: setup
	@$(BIN)/routeblock recover results
	@$(BIN)/routeblock repair results reports
	@$(MAKE) --no-print-directory study
	@$(MAKE) --no-print-directory verify

clean:
	@find results reports -mindepth 1 -maxdepth 1 ! -name .gitkeep ! -name README.md -exec rm -rf {} +
	@rm -rf .snakemake .pytest_cache .mypy_cache .ruff_cache
