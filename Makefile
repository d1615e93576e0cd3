# make train · make test · make test-all · make lint · make figures · make gpu: each sets up .venv by itself
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
RANKS ?= 2
ARGS ?=
# where figures and gpu write; with ARGS=--toy into runs/benchmarks/toy
RESULTS ?= $(if $(findstring --toy,$(ARGS)),,--out benchmarks/results --figures docs/figures)

train: $(VENV)/installed
	$(VENV)/bin/torchrun --nproc-per-node $(RANKS) train.py $(ARGS)

# One test more at a time than there are cores, up to 8: ranks and their launchers often wait. Each
# has one thread. Bytecode is kept, for tests start many interpreters.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(8, len(os.sched_getaffinity(0)) + 1))")
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test: $(VENV)/tests-installed
	$(PYTEST) $(ARGS)

test-all: $(VENV)/tests-installed
	$(PYTEST) --all $(ARGS)

# another version, by hand: make test-torch TORCH=2.11.0 PYTHON=python3.12
test-torch:
	$(MAKE) test VENV=.venv-$(TORCH)

lint: $(VENV)/tests-installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python

figures: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks.activation_memory $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.recompute_overhead $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.pipeline $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.context $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.planner $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.serving_plan $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.zero_memory $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.fsdp $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.silent_bugs $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.packing $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.rollout $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.reproduction $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.fp8 $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.loss_of_variants experts $(RESULTS) $(ARGS)   # half an hour of this
	$(VENV)/bin/pip install --quiet transformers
	$(VENV)/bin/python -m benchmarks.generation $(RESULTS) $(ARGS)
	$(VENV)/bin/python -m benchmarks.layouts $(RESULTS) $(ARGS)

# on a GPU, twelve minutes; ARGS="gpt2 llama" runs these stages (docs/gpu.md)
gpu: $(VENV)/tests-installed
	$(VENV)/bin/python -m benchmarks.gpu $(RESULTS) $(ARGS)

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# pip compiles bytecode on one core; compileall takes all, and leaves out the packages' own tests
define install
	$(VENV)/bin/pip install --no-compile torch==$(TORCH) -e $(1)
	$(VENV)/bin/python -m compileall -q -j 0 -x '/tests/|/py312' $(VENV)/lib
endef

$(VENV)/installed: pyproject.toml | $(VENV)/bin/pip
	$(call install,".[serve]")
	touch $@

$(VENV)/tests-installed: pyproject.toml | $(VENV)/bin/pip
	$(call install,".[dev]")
	touch $(VENV)/installed $@

.PHONY: train test test-all test-torch lint figures gpu
