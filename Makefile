# make train · make test · make test-all · make lint · make figures · make gpu: each sets up .venv by itself
PYTHON ?= python3
RANKS ?= 2
ARGS ?=
# where figures and gpu write; with ARGS=--toy into runs/comparisons/toy
RESULTS ?= $(if $(findstring --toy,$(ARGS)),,--out comparisons --figures figures)

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
	.venv/bin/python comparisons/activation_memory.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/recompute_overhead.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/pipeline.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/context.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/planner.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/serving_plan.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/zero_memory.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/fsdp.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/silent_bugs.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/packing.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/preference.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/rollout.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/reproduction.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/fp8.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/moe.py training $(RESULTS) $(ARGS)             # half an hour of this
	.venv/bin/pip install --quiet transformers
	.venv/bin/python comparisons/generation.py $(RESULTS) $(ARGS)
	.venv/bin/python comparisons/layouts.py $(RESULTS) $(ARGS)

# on a GPU, twelve minutes; ARGS="gpt2 llama" runs these stages (docs/gpu.md)
gpu: .venv/tests-installed
	.venv/bin/python comparisons/gpu.py $(RESULTS) $(ARGS)

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
