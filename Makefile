# make setup   a virtual environment in .venv with everything (once; about 3 GB, 2 to 3 minutes)
# make demo    prepare a text, train a small hybrid on it, let it write, score it: about 5 minutes on 2 CPU cores
# make test    lint and tests
#
# PYTHON=/path/to/python make demo     use a Python that has the packages already; no environment is made
# TORCH_INDEX=URL make setup           take torch from this index (a CPU build, another CUDA version: see the README)

TORCH ?= torch==2.13.0

ifeq ($(origin PYTHON), undefined)
PYTHON := .venv/bin/python
READY := .venv/ready
endif

.PHONY: setup demo test
setup: $(READY)

demo: $(READY)
	$(PYTHON) train.py configurator/recipes/demo.py --overwrite
	$(PYTHON) sample.py out/demo --start="The state of the Union"
	$(PYTHON) eval.py out/demo

test: $(READY)
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest

.venv/ready: requirements.txt requirements-dev.txt
	@echo "setting up .venv (once): $(TORCH), then requirements.txt and requirements-dev.txt"
	@for p in python3 python3.12 python3.11; do \
	  if $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; p=; done; \
	if [ -z "$$p" ]; then echo "error: no Python 3.11 or newer with venv on the PATH; name one: PYTHON=/path/to/python make demo" >&2; exit 2; fi; \
	[ -x .venv/bin/python ] || $$p -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	@touch $@
