"""Gated delta nets of Qwen3-Next and Qwen3.5 train: one gradient under every layout and in any packing."""

import json
import subprocess
import sys

import numpy as np
import pytest
from cli_runs import RECIPES, make_workspace, succeed
from groups import leave_groups
from ranks import run_ranks
from small_models import VOCAB, small_model
from trainer_cases import packed_batches, token_cross_entropy, trainer_config
from transformers import AutoConfig
from weight_cases import join

from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.models.families.delta_nets import linear_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import partial_rotary_factor, published_config, read_hf_config, rope_theta
from slimrl.observability.metrics import read_metrics
from slimrl.trainer.build import build_model
from slimrl.trainer.layout.parallel import destroy_parallel, init_model_parallel
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TP2_SP = {"tensor": 2, "sequence": True}
TWO_RANKS = [{"context": 2}, {**TP2_SP, "expert": 2}, {**TP2_SP, "expert_tensor": 2}, {"pipeline": 2}, {}]
"""The last is two data-parallel ranks."""
FOUR_RANKS = [
    {**TP2_SP, "context": 2, "expert": 4},
    {**TP2_SP, "context": 2, "expert": 2, "expert_tensor": 2},
    {"context": 2, "pipeline": 2},
    {"context": 4},
    {"pipeline": 4},
]
"""In the last each stage has one layer: three of them no attention."""
UNEVEN = [
    {"pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 2, "megatron": {"num_layers_in_first_pipeline_stage": 1}},
    {"context": 2, "expert": 2},
]
WHOLE_GRADIENTS = OptimizerConfig(lr=1e-3, distributed=False)


def gradients(rank, num_ranks, port, path, cases):
    """For each case: summed loss, this rank's micro-batches, and on rank 0 every Hugging Face tensor's gradient."""
    join(rank, num_ranks, port)
    hf_config = read_hf_config(path)
    family, results = family_of(hf_config), []
    for case in cases:
        trainer = trainer_config(num_ranks, **{"optimizer": WHOLE_GRADIENTS, **case})
        leave_groups()
        layout = init_model_parallel(trainer.parallel, timeout_s=60, seed=0)
        chunks = build_model(trainer, family.megatron_config(hf_config))
        load_hf_weights(chunks, path, family, hf_config)
        optimizer = Optimizer(trainer, chunks, 10)

        def gradients_as_weights(chunks=chunks, *, finite: bool) -> float:
            assert finite
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.copy_(parameter.main_grad)
            return 1.0

        optimizer.step = gradients_as_weights
        runner = MicroBatchRunner(chunks, optimizer, layout, vocab_size=VOCAB, chunk_tokens=48)
        batches = packed_batches(0, layout, trainer.max_tokens_per_rank)
        result = runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
        tensors = MegatronWeightSource(chunks, family, hf_config).tensors()
        whole = {name: tensor.numpy().copy() for name, tensor in tensors if tensor is not None}
        results.append((result.sums["loss"], len(batches), whole))
    destroy_parallel()
    return results


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.full)])
def path(request, tmp_path_factory):
    return small_model(request.param, tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def one_rank(path):
    """With all sequences in one pack, and with most of them alone."""
    return run_ranks(gradients, 1, path, [{"max_tokens_per_rank": 1024}, {"max_tokens_per_rank": 57}], timeout_s=200)[0]


def assert_equal(actual, expected, where):
    assert actual[0] == pytest.approx(expected[0], rel=1e-6), where
    assert actual[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        difference = np.abs(actual[2][name] - gradient).max()
        assert difference <= 1e-4 * np.abs(gradient).max() + 1e-7, (where, name, difference)


def test_a_pack_gives_the_gradient_of_its_sequences_apart(one_rank):
    packed, apart = one_rank
    assert (packed[1], apart[1]) == (1, 9)
    assert_equal(packed, apart, "packed")
    trained = [name for name, gradient in packed[2].items() if np.abs(gradient).max() > 1e-5]
    assert trained == list(packed[2])


def test_two_ranks_have_the_gradient_of_one(path, one_rank):
    results = run_ranks(gradients, 2, path, TWO_RANKS, timeout_s=250)[0]
    for case, result in zip(TWO_RANKS, results, strict=True):
        assert_equal(result, one_rank[0], case)


@pytest.mark.full
def test_four_ranks_have_the_gradient_of_one(path, one_rank):
    results = run_ranks(gradients, 4, path, FOUR_RANKS, timeout_s=250)[0]
    for case, result in zip(FOUR_RANKS, results, strict=True):
        assert_equal(result, one_rank[0], case)


@pytest.mark.full
def test_layers_of_all_kinds_in_any_order_have_one_gradient_under_two_ranks(tmp_path):
    path = small_model("qwen3_next_mixed", tmp_path / "hf")
    (expected,) = run_ranks(gradients, 1, path, [{"max_tokens_per_rank": 1024}], timeout_s=200)[0]
    for case, result in zip(UNEVEN, run_ranks(gradients, 2, path, UNEVEN, timeout_s=250)[0], strict=True):
        assert_equal(result, expected, case)


@pytest.mark.full
def test_a_supervised_run_learns_and_exports_a_whole_checkpoint(tmp_path):
    workspace = make_workspace(tmp_path, "qwen3_next")
    data = f"data.train={workspace.path / 'data' / 'sft.jsonl'}"
    settings = [data, "steps=12", "sft.batch_conversations=4", "trainer.optimizer.warmup_updates=1"]
    succeed("sft", str(RECIPES / "sft.yaml"), *workspace.overrides(*settings), timeout_s=250)
    folder = workspace.run_folder("sft")
    losses = [line["sft/loss"] for line in read_metrics(folder.metrics) if "sft/loss" in line]
    assert losses[-1] < losses[0] - 1
    check_checkpoint(folder.export)


SGLANG_READS = """
import json, sys
from slimrl.engines.plugin import cpu
cpu.install()
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.utils.hf_transformers.common import get_rope_config
read = []
for given in json.load(sys.stdin):
    config = (Qwen3NextConfig if given["model_type"] == "qwen3_next" else Qwen3_5MoeTextConfig)(**given)
    layers = config.linear_layer_ids if hasattr(config, "full_attention_interval") else None
    theta, scaling = get_rope_config(config)
    # Where scaling is a dictionary without a kind, SGLang refuses the model.
    read.append([layers, None if scaling == {} else theta, config.partial_rotary_factor])
print(json.dumps(read))
"""


def served_as_trained(configs: list[dict]) -> list[bool]:
    """Whether SGLang reads the layers and positions of each config as the trainer does."""
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_READS], input=json.dumps(configs), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained = [[list(linear_layers(c)), rope_theta(c), partial_rotary_factor(c, 0.25)] for c in configs]
    return [read == config for read, config in zip(json.loads(done.stdout), trained, strict=True)]


def test_a_config_is_served_where_sglang_reads_the_model_that_is_trained():
    released = {**published_config("Qwen3-Next-80B-A3B"), "num_hidden_layers": 8}
    saved = AutoConfig.for_model(**released).to_dict()
    half = AutoConfig.for_model(**{**released, "partial_rotary_factor": 0.5}).to_dict()
    keys = {"full_attention_interval": 4, "rope_theta": 10_000_000}
    configs = [
        released, saved, {**saved, **keys}, {**saved, **keys, "rope_theta": 10_000}, {**half, **keys},
        {**released, "full_attention_interval": 3}, {**released, "layer_types": ["linear_attention"] * 8},
        {**released, "layer_types": ["linear_attention"] * 8, "full_attention_interval": 9},
    ]  # fmt: skip
    served = served_as_trained(configs)
    assert served == [family_of(config).unserved(config) is None for config in configs]
    assert served == [True, False, True, False, True, True, False, True]


def test_so_is_one_of_qwen3_5():
    released = {**published_config("Qwen3.5-35B-A3B"), "num_hidden_layers": 8}
    saved, rope = AutoConfig.for_model(**released).to_dict(), released["rope_parameters"]
    half = {**released, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
    flat = {name: value for name, value in released.items() if name != "rope_parameters"} | {"rope_theta": 1e7}
    configs = [
        released, saved, {**saved, "full_attention_interval": 4}, half, {**half, "partial_rotary_factor": 0.5}, flat,
        {**released, "full_attention_interval": 3}, {**released, "layer_types": ["linear_attention"] * 8},
    ]  # fmt: skip
    served = served_as_trained(configs)
    assert served == [family_of(config).unserved(config) is None for config in configs]
    assert served == [True, False, True, False, True, False, True, False]
