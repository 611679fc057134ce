# Two commands start everything: `make quickstart` and `make test`. Each sets up .venv first when it is missing or old.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts
# Newer than what it depends on when .venv holds what requirements/ asks for.
STAMP := $(VENV)/.installed

# Where `make quickstart` puts its model, data and runs, and the seed of all of them. What is there already is moved to
# $(EARLIER), in place of what that held.
QUICKSTART ?= runs/quickstart
EARLIER = $(QUICKSTART:/=).old
SEED ?= 0
OF_THIS_RUN := run.dir=$(QUICKSTART) seed=$(SEED)
SFT := recipes/tiny_moe/sft.yaml $(OF_THIS_RUN)
RL := recipes/tiny_moe/gspo_calculator.yaml $(OF_THIS_RUN) data.train=$(QUICKSTART)/data/train.jsonl data.eval.heldout=$(QUICKSTART)/data/heldout.jsonl

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all mutation lint format bench lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned dependencies: some minutes, 2.2 GB (again when requirements/ changes)

$(STAMP): requirements/cpu.txt requirements/dev.txt requirements/no-deps.txt requirements/lock.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned dependencies into $(VENV): 2.2 GB on disk, a few minutes."
	@echo "  1/4 requirements/cpu.txt (most of it)"
	@$(PIP) --constraint requirements/lock.txt --requirement requirements/cpu.txt
	@echo "  2/4 requirements/dev.txt"
	@$(PIP) --constraint requirements/lock.txt --requirement requirements/dev.txt
	@echo "  3/4 requirements/no-deps.txt"
	@$(PIP) --no-deps --requirement requirements/no-deps.txt
	@echo "  4/4 slimrl"
	@$(PIP) --no-deps --editable .
	@touch $@

quickstart: $(STAMP) ## train a small MoE to use a calculator, from random weights to the learning curve (about 11 minutes; moves an earlier one to runs/quickstart.old)
	@if [ -e $(QUICKSTART) ]; then \
	    rm -rf $(EARLIER) && mv $(QUICKSTART) $(EARLIER) && echo "$(QUICKSTART) of an earlier time is now $(EARLIER)"; fi
	$(BIN)/slimrl-tools toy qwen3_moe $(QUICKSTART)/model --seed $(SEED)
	$(BIN)/slimrl-tools calculator-data $(QUICKSTART)/data --seed $(SEED)
	$(BIN)/slimrl sft $(SFT) model.path=$(QUICKSTART)/model data.train=$(QUICKSTART)/data/sft.jsonl
	$(BIN)/slimrl eval $(RL) --checkpoint $(QUICKSTART)/sft/export/hf --json $(QUICKSTART)/before.json
	$(BIN)/slimrl train $(RL) model.path=$(QUICKSTART)/sft/export/hf
	$(BIN)/slimrl eval $(RL) --checkpoint $(QUICKSTART)/gspo/export/hf --json $(QUICKSTART)/after.json
	$(BIN)/slimrl eval $(RL) agent.tools=[] --checkpoint $(QUICKSTART)/gspo/export/hf --json $(QUICKSTART)/without_calculator.json

# The long ones first: short ones fill the last minutes of all processes.
test: $(STAMP) ## representative integration tests, then unit tests (about 20 minutes on 2 cores)
	$(BIN)/python -m pytest --durations 15 -m "not full and not gpu" tests/integration tests/unit

test-all: $(STAMP) ## every test that needs no GPU, the full matrices included
	$(BIN)/python -m pytest -m "not gpu" tests/integration tests/unit

mutation: $(STAMP) ## plant the faults of tests/mutation one by one, and print those that no test notices (hours)
	$(BIN)/python tests/mutation/run.py --workers 2

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the source into ruff's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## decoding against SGLang as shipped; block FP8 against plain torch; resyncs and conversions against copies; one training step of fixed work
	$(BIN)/python benchmarks/decode.py --json runs/bench/decode.json
	$(BIN)/python benchmarks/quantize.py --json runs/bench/quantize.json
	$(BIN)/python benchmarks/resync.py --json runs/bench/resync.json
	$(BIN)/python benchmarks/conversion.py --gigabytes 1 --json runs/bench/conversion.json
	$(BIN)/python benchmarks/step.py --json runs/bench/step.json

lock: ## write requirements/lock.txt anew from what .venv holds
	(sed -n '/^#/p' requirements/lock.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements/lock.new
	mv requirements/lock.new requirements/lock.txt
