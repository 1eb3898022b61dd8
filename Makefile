# Everything a newcomer needs: `make demo` trains an agent, `make test` runs the tests.
#
# On x86-64 Linux the index's plain `torch` is a CUDA build of several gigabytes. TORCH pins a
# CPU-sized one where it can be had; set TORCH_INDEX to PyTorch's CPU index elsewhere, or TORCH=torch
# on a GPU machine (see the README).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install demo test test-fast test-slow check bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install -q -e ".[gguf,openai,data,dev]"
	touch $@

demo: install
	$(BIN)/stepladder train calculator --overwrite

test: install
	$(BIN)/python -m pytest

# For the inner loop: the parts whose tests train nothing, about a minute and a half on one core.
FAST = $(addprefix tests/,data diagnostics environments objectives recipe rewards play reports) \
  $(addprefix tests/test_,layers.py algorithms.py atomic.py boundary.py plugins.py success.py)

test-fast: install
	$(BIN)/python -m pytest $(FAST) \
	  --deselect tests/objectives/test_worked_examples.py::test_row_8_the_agent_discovers_search

test-slow: install
	$(BIN)/python -m pytest -m slow --timeout 3600

# About 35 minutes; the peers are optional: STEPLADDER_TRL and STEPLADDER_VLLM name their Pythons
# (bench/make_trl_env.sh, bench/make_vllm_env.sh). BENCH: options of bench/speed.py.
bench: install
	$(BIN)/python bench/speed.py $(BENCH)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy stepladder

clean:
	rm -rf $(VENV) build dist *.egg-info
