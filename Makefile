# make train · make test · make test-all · make lint · make figures · make gpu: each sets up .venv by itself
PYTHON ?= python3
RANKS ?= 2
ARGS ?=
# where figures and gpu write; with ARGS=--toy into runs/benchmarks/toy
RESULTS ?= $(if $(findstring --toy,$(ARGS)),,--out benchmarks/results --figures docs/figures)

train: .venv/installed
	.venv/bin/torchrun --nproc-per-node $(RANKS) train.py $(ARGS)

# One test more at a time than there are cores, up to 8: ranks and their launchers often wait. Each
# has one thread.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(8, len(os.sched_getaffinity(0)) + 1))")
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal

test: .venv/tests-installed
	$(PYTEST) $(ARGS)

test-all: .venv/tests-installed
	$(PYTEST) --all $(ARGS)

# another version, by hand: make test-torch TORCH=2.11.0 PYTHON=python3.12
TORCH ?= 2.12.1
OTHER = .venv-$(TORCH)

test-torch: $(OTHER)/installed
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

$(OTHER)/installed: requirements.txt tests/requirements.txt
	$(PYTHON) -m venv $(OTHER)
	cat requirements.txt tests/requirements.txt | sed '/^-r/d; s/^torch==.*/torch==$(TORCH)/' \
	    > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --no-compile -r $(OTHER)/requirements.txt
	touch $@

lint: .venv/tests-installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

figures: .venv/installed
	.venv/bin/python -m benchmarks.activation_memory $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.recompute_overhead $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.pipeline $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.context $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.planner $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.serving_plan $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.zero_memory $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.fsdp $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.silent_bugs $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.packing $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.preference $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.rollout $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.reproduction $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.fp8 $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.moe training $(RESULTS) $(ARGS)             # half an hour of this
	.venv/bin/pip install --quiet transformers
	.venv/bin/python -m benchmarks.generation $(RESULTS) $(ARGS)
	.venv/bin/python -m benchmarks.layouts $(RESULTS) $(ARGS)

# on a GPU, twelve minutes; ARGS="gpt2 llama" runs these stages (docs/gpu.md)
gpu: .venv/tests-installed
	.venv/bin/python -m benchmarks.gpu $(RESULTS) $(ARGS)

.venv/bin/pip:
	$(PYTHON) -m venv .venv

# pip compiles bytecode on one core; compileall takes all, and leaves out the packages' own tests
define install
	.venv/bin/pip install --no-compile -r $(1)
	.venv/bin/python -m compileall -q -j 0 -x '/tests/|/py312' .venv/lib
endef

.venv/installed: requirements.txt | .venv/bin/pip
	$(call install,requirements.txt)
	touch $@

# its requirements.txt includes the other: one call of pip
.venv/tests-installed: requirements.txt tests/requirements.txt | .venv/bin/pip
	$(call install,tests/requirements.txt)
	touch .venv/installed $@

.PHONY: train test test-all test-torch lint figures gpu
