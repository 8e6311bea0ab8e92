# Two commands for a newcomer: `make run` and `make test`. Each does all its own set-up, on a fresh machine too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Explain in three sentences why the sky is blue.
MAX_NEW_TOKENS ?= 160
BENCH ?= --per-suite 1 --max-new-tokens 64

DNNL_ROOT ?= .dnnl-root

.PHONY: help run test test-full test-dnnl check docs bench clean

help:
	@echo "make run [PROMPT=\"...\"]   set up, export the default pair, answer, and show plain decoding beside it"
	@echo "make test                 set up and run the tests"
	@echo "make test-full            the same with the whole lossless matrix on the default pair"
	@echo "make test-dnnl            as root: tests and a benchmark with oneDNN, in a Debian 13 root that it makes"
	@echo "make check                ruff and mypy"
	@echo "make docs                 write docs/cli.md from the commands' own help"
	@echo "make bench [BENCH=\"...\"]  decoding speed side by side, a quick look unless told otherwise"

# A virtual environment that knows what it was made for: changing pyproject.toml makes it anew.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $$($(PYTHON) --version 2>&1) was found; set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(1)]'
	@touch $@
endef

$(VENV)/.ready-export: pyproject.toml
	$(call install,export)

$(VENV)/.ready-dev: pyproject.toml
	$(call install,dev)
	@touch $(VENV)/.ready-export

run: $(VENV)/.ready-export
	@$(BIN)/dflash-ort inspect > /dev/null 2>&1 || $(BIN)/dflash-ort export --force
	@$(BIN)/dflash-ort run --stats --compare --max-new-tokens $(MAX_NEW_TOKENS) "$(PROMPT)"

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not full"

test-full: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

test-dnnl: $(VENV)/.ready-dev
	$(BIN)/python -m tests.dnnl $(DNNL_ROOT)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready-dev
	$(BIN)/python -m docs.cli_reference

bench: $(VENV)/.ready-export
	@$(BIN)/dflash-ort inspect > /dev/null 2>&1 || $(BIN)/dflash-ort export --force
	$(BIN)/dflash-ort bench $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
