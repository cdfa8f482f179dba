# The two commands of the README are `make run` and `make test`. Both make .venv first, which
# takes some minutes the first time and none after that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROFILE ?= quick
INSTALLED := $(VENV)/.installed

.PHONY: run test lab bench site lint clean

run: $(INSTALLED)
	$(BIN)/dslib run --profile $(PROFILE)

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/dslib lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lab: $(INSTALLED)
	$(BIN)/dslib lab

bench: $(INSTALLED)
	$(BIN)/dslib bench muon

# The README shows the newest run also when a claim of it failed.
site: $(INSTALLED)
	-$(BIN)/dslib run --profile $(PROFILE)
	$(BIN)/python docs/make_readme.py

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:3]; sys.exit(0 if v >= (3, 11, 5) else "Python %d.%d.%d is too old: the pinned packages need 3.11.5 or newer. Name one: make PYTHON=python3.12 …" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
