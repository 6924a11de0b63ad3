# Set-up, checks and studies. All of it runs in .venv, whatever environment is active.

PYTHON ?= python3
CORES ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint envs/constraints.txt

unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX
export PYTHONNOUSERSITE := 1
export PYTHONUTF8 := 1

.PHONY: setup study report test test-recovery test-report test-slurm test-vllm check-vllm-wheels bundle prediction bench verify repair clean

setup: .venv/base.stamp

.venv/base.stamp: envs/base.txt envs/constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v}; 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) --requirement envs/base.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev.stamp: .venv/base.stamp envs/dev.txt envs/cuda13.txt
	@$(PIP) --requirement envs/dev.txt --requirement envs/cuda13.txt
	@touch $@

# CUDA 12 is the last to compile for sm_70. Its packages and CUDA 13's exclude each other.
.venv-cuda12/stamp: envs/cuda12.txt envs/constraints.txt
	@$(PYTHON) -m venv .venv-cuda12
	@.venv-cuda12/$(PIP:.venv/%=%) --constraint envs/base.txt --requirement envs/cuda12.txt
	@touch $@

# Also after a power cut or kill -9: the jobs that were left are waited for, and what they did not finish is made again.
study: setup
	@$(BIN)/routeblock check-config
	@$(BIN)/routeblock recover results
	@$(BIN)/snakemake --profile workflow/profiles/default --cores $(CORES)

# One HTML file; where the tables are there, it is made from them.
report: setup
	@$(BIN)/snakemake --profile workflow/profiles/default --cores $(CORES) -- report

test: .venv/dev.stamp .venv-cuda12/stamp
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/snakefmt --check Snakefile workflow/rules
	@$(BIN)/python tests/workflow/lint.py
	@$(BIN)/pytest -n 2

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
test-slurm: .venv/slurm.stamp
	@tests/slurm/install.sh
	@timeout --kill-after=60 1800 $(BIN)/pytest --override-ini addopts=-q tests/slurm

.venv/slurm.stamp: .venv/dev.stamp envs/slurm.txt
	@$(PIP) --requirement envs/slurm.txt
	@touch $@

bundle: setup
	@$(BIN)/snakemake --profile workflow/profiles/default --cores $(CORES) bundle

# The prediction on 200 random plans at three grids; a few minutes.
prediction: setup
	@$(BIN)/snakemake --profile workflow/profiles/default --cores $(CORES) table_prediction

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
