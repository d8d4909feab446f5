# Everything a user or CI does with this repository. `make demo` and `make test` work on a fresh clone.
#
#   VENV=dir            where the virtual environment is (default .venv)
#   PYTHON=python3.12   which Python makes it
#   MATRIX="torch==2.14.1"   which entry of `make matrix` (scripts/matrix.py --list); all if it is empty
#   MUTATE="plan gate"       what `make mutate` is to do (scripts/mutate.py --help)
#   WORKERS=2                how many tests `make test` runs at once (default: 2 for each core, at most 8)
#   TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"    pip options for torch alone (CPU or CUDA build)

VENV ?= .venv
BENCH_VENV ?= /tmp/bench-venv
BENCHMARKS ?= tag parity decisions reshaping regroup control_group stores detect cold overhead hooks own_state restore scale \
              recovery \
              $(if $(filter 0,$(shell id -u)),copies decode)  # the last two need root, for network namespaces
CUDA_VENV ?= /tmp/cuda-venv
NEW_VENV ?= /tmp/new-venv
NEW_PYTHON := 3.12
PYTHON ?= python3
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
CUDA_TORCH_VERSION ?= 2.14.1
BIN := $(VENV)/bin
NEW_PIP = $(NEW_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-new.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# On all cores, which pip does on one. What is for another Python version cannot be compiled, and need not be.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
DEMO_DIR ?= runs/demo
BENCH_ARGS ?=
MATRIX ?=
MATRIX_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= $(shell n=$$(($$(nproc) * 2)); echo $$((n < 8 ? n : 8)))
GPU_CHECK_ARGS ?=
SEEDS ?= 2000
SIMULATE_ARGS ?=
PAGES = $(shell git ls-files '*.md')

# Where it is set, each of a job's processes would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-asan test-tsan test-cuda-build test-new test-slurm matrix lint format grid grid-deepspeed grid-megatron grid-libraries soak soak-deepspeed soak-megatron chaos gpu-check bench bench-setup mutate mutate-session mutate-parity mutate-nccl simulate docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# torch comes first and alone, so that no other package's requirement chooses its build.
$(BIN)/.setup-done: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "==> virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> torch $(TORCH_VERSION)"
	@$(PIP) $(TORCH_INDEX) torch==$(TORCH_VERSION) -c constraints.txt
	@echo "==> flashrecovery and its tests' requirements"
	@$(PIP) -c constraints.txt --editable '.[test]'
	@$(COMPILE)
	@touch $@

setup: $(BIN)/.setup-done  ## make the virtual environment and compile the process-group backend
	@echo "==> process-group backend (compiled once for this torch)"
	@$(BIN)/flashrecovery doctor --build

demo: setup  ## train a small GPT on 4 ranks, SIGKILL rank 1 in the backward of step 30, and go on
	@rm -rf $(DEMO_DIR)
	$(BIN)/flashrecovery run --nproc-per-node 4 --standby 1 --run-dir $(DEMO_DIR) \
	    --inject rank=1,fault=sigkill,at=backward,step=30 \
	    examples/gpt/train_ddp.py --steps 60 --digest
	$(BIN)/flashrecovery report $(DEMO_DIR)

lint: $(BIN)/.setup-done  ## ruff, mypy (strict), and the form of the documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=common:.:examples/gpt:benchmarks $(BIN)/mypy examples/gpt/*.py examples/gpt/launchers/*.py benchmarks/*.py benchmarks/peers/*.py
	$(BIN)/pymarkdown scan $(PAGES)

format: $(BIN)/.setup-done  ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/.frameworks-done: $(BIN)/.setup-done
	@echo "==> deepspeed, megatron-core, transformers, accelerate"
	@$(PIP) -c constraints.txt --editable '.[test,deepspeed,megatron,trainer]'
	@$(COMPILE)
	@touch $@

# Files of jobs come first, and those of unit tests fill up the end. More workers than cores: jobs wait now and then.
test: $(BIN)/.frameworks-done  ## set up, check the code, run the tests (about 20 minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 --output-sync=target setup lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 $(PYTEST_ARGS)

test-asan: setup  ## the tests of the groups, the C++ built with AddressSanitizer: nothing of ours is reported
	$(BIN)/python -m tests.sanitizers address $(PYTEST_ARGS)

test-tsan: setup  ## the same with ThreadSanitizer
	$(BIN)/python -m tests.sanitizers thread $(PYTEST_ARGS)

test-cuda-build:  ## an environment with a CUDA build of torch (5.5 GB; needs no GPU), and the tests of groups, DDP and FSDP there
	CUDA_VENV=$(CUDA_VENV) PYTHON=$(PYTHON) CUDA_TORCH_VERSION=$(CUDA_TORCH_VERSION) CUDA_TORCH_INDEX='$(CUDA_TORCH_INDEX)' \
	    scripts/cuda-venv.sh
	$(CUDA_VENV)/bin/python -c "from flashrecovery import groups; from tests.support import fake_nccl; groups.build(); fake_nccl.build()"
	$(CUDA_VENV)/bin/python -m pytest --durations=10 $(PYTEST_ARGS) tests/unit/test_groups_build.py tests/unit/test_torch_native.py \
	    tests/integration/groups/test_nccl_build.py tests/integration/groups/test_nccl.py tests/integration/groups/test_groups_*.py \
	    tests/conformance/test_nccl.py tests/conformance/test_grid.py

# Not `make setup`: an environment of its own, of which every version stands in constraints-new.txt.
$(NEW_VENV)/.done: pyproject.toml constraints-new.txt
	@test -x $(NEW_VENV)/bin/python || "$$($(PYTHON) scripts/matrix.py --find-python $(NEW_PYTHON))" -m venv $(NEW_VENV)
	@echo "==> $(NEW_VENV): the newest torch, deepspeed, megatron-core, transformers, accelerate"
	@$(NEW_PIP) $(TORCH_INDEX) torch
	@$(NEW_PIP) --editable '.[test,deepspeed,megatron,trainer]' emerging-optimizers
	@touch $@

test-new: $(NEW_VENV)/.done  ## a part of the tests on Python 3.12 with the newest releases (5.5 GB; 5 minutes on two cores)
	$(NEW_VENV)/bin/python -m flashrecovery.cli.main doctor --build
	$(NEW_VENV)/bin/python -m pytest -m "" -p no:cacheprovider -n 2 --dist loadgroup --durations=10 $(PYTEST_ARGS) $$($(NEW_VENV)/bin/python scripts/matrix.py --tests-new)

matrix: setup $(BIN)/.frameworks-done  ## chosen tests with each supported version, and docs/versions.md (MATRIX="torch==2.14.1": one)
	$(BIN)/python scripts/matrix.py $(MATRIX_ARGS) $(if $(MATRIX),"$(MATRIX)")

test-slurm: setup  ## the example on a real Slurm cluster of one machine (root; Debian: slurmctld slurmd slurm-client munge)
	$(BIN)/python -m pytest -m slurm --durations=15 $(PYTEST_ARGS) tests/integration/launchers/test_slurm.py tests/integration/launchers/test_slurm_tasks.py

grid: setup  ## the whole conformance grid with plain PyTorch, and all slow tests
	$(BIN)/python -m pytest -m "(grid or slow) and not deepspeed and not megatron and not slurm" --durations=15 $(PYTEST_ARGS)

grid-deepspeed: setup $(BIN)/.frameworks-done  ## the whole conformance grid with DeepSpeed and the Trainer
	$(BIN)/python -m pytest -m "deepspeed and not soak" --durations=15 $(PYTEST_ARGS)

grid-megatron: setup $(BIN)/.frameworks-done  ## the whole conformance grid with megatron-core; MEGATRON_LM: a checkout
	@if [ -n "$$MEGATRON_LM" ]; then $(PIP) -c constraints.txt --editable '.[test,megatron-lm]'; fi
	$(BIN)/python -m pytest -m "megatron and not soak" --durations=15 $(PYTEST_ARGS)

$(BIN)/.libraries-done: $(BIN)/.frameworks-done
	@echo "==> trl, peft, lightning, torchao, bitsandbytes, schedulefree, prodigyopt"
	@$(PIP) -c constraints.txt --editable '.[libraries]'
	@touch $@

grid-libraries: setup $(BIN)/.libraries-done  ## jobs with trainers and optimizers of other projects (TRL, peft, Lightning, torchao, ...)
	$(BIN)/python -m pytest -m "libraries" --durations=15 $(PYTEST_ARGS)

soak: setup  ## kills at random phases and ranks, 200 and twice 60, and 350 at random moments under the fake of NCCL; elastic jobs: the same bits
	$(BIN)/python -m pytest -m "soak and not deepspeed and not megatron" -s $(PYTEST_ARGS)

soak-deepspeed: setup $(BIN)/.frameworks-done  ## 60 kills of each ZeRO stage, 75 under the fake of NCCL
	$(BIN)/python -m pytest -m "soak and deepspeed" -s $(PYTEST_ARGS)

soak-megatron: setup $(BIN)/.frameworks-done  ## 200 kills of TP2 x DP2, 60 with overlaps, 75 under the fake of NCCL
	$(BIN)/python -m pytest -m "soak and megatron" -s $(PYTEST_ARGS)

simulate: $(BIN)/.setup-done  ## SEEDS=100000 histories of the real controller and agents on a virtual clock: none breaks a law
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --shrink $(SIMULATE_ARGS)

gpu-check: setup $(BIN)/.frameworks-done  ## on a machine with NVIDIA GPUs: a rank killed in every phase, each layout, the same bits, and a report
	$(BIN)/python -m tests.gpu_check $(GPU_CHECK_ARGS)

chaos: setup  ## 200 random faults of ranks, nodes, links and controllers on four hosts: streams, relays, parity (needs root)
	$(BIN)/python -m pytest -m chaos -s $(PYTEST_ARGS)

$(BIN)/.docs-done: $(BIN)/.setup-done
	@$(PIP) -c constraints.txt --editable '.[test,docs]'
	@touch $@

docs: $(BIN)/.docs-done  ## the pages of docs/ with an API reference, as a static site in site/; broken references fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(BIN)/.mutate-done: $(BIN)/.setup-done
	@$(PIP) -c constraints.txt --editable '.[test,mutate]'
	@touch $@

mutate: $(BIN)/.mutate-done  ## change the code in small ways and list what no unit test notices (MUTATE="plan --minutes 60")
	$(BIN)/python scripts/mutate.py $(MUTATE)

mutate-session: $(BIN)/.setup-done  ## the same for the worker's session, with whole jobs as the tests (MUTATE="void --jobs 2")
	$(BIN)/python scripts/mutate_session.py $(MUTATE)

mutate-parity: $(BIN)/.setup-done  ## the same for parity, with processes that are killed as the tests (MUTATE="digests --jobs 2")
	$(BIN)/python scripts/mutate_parity.py $(MUTATE)

mutate-nccl: $(BIN)/.setup-done  ## take each mend for NCCL out again: a test must notice, without a GPU (MUTATE="04- 17-")
	$(BIN)/python scripts/mutate_nccl.py $(MUTATE)

bench-setup:  ## an environment of its own with the peers that the benchmarks compare with
	BENCH_VENV=$(BENCH_VENV) PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) TORCH_INDEX='$(TORCH_INDEX)' \
	    scripts/bench-venv.sh

bench: setup bench-setup  ## all benchmarks, side by side with the peers (BENCH_ARGS=--quick for a short look)
	@failed=; for name in $(BENCHMARKS); do \
	    echo "==> benchmarks/$$name.py"; \
	    $(BENCH_VENV)/bin/python benchmarks/$$name.py $(BENCH_ARGS) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "goals missed or not measured:$$failed"; exit 1; }

clean:  ## remove the virtual environment, caches and demo runs
	rm -rf $(VENV) $(DEMO_DIR) site .pytest_cache .mypy_cache .ruff_cache .hypothesis flashrecovery.egg-info
