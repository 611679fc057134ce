"""Every family: the logits of transformers, and weights that come back bit for bit under every kind of layout."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from small_models import CONFIGS, VOCAB, num_experts, small_model
from transformers import AutoModelForCausalLM
from weight_cases import (
    DENSE_LAYOUTS_OF_2,
    DENSE_LAYOUTS_OF_4,
    MOE_LAYOUTS_OF_2,
    MOE_LAYOUTS_OF_4,
    join,
    loaded_chunks,
    packed_logits,
    round_trip,
)

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.trainer.build import unwrap
from slimrl.trainer.weight_source import MegatronWeightSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BOUNDS = [0, 17, 40, 41, 161]
"""Bounds of four sequences packed one after the other."""


def test_every_family_gives_the_logits_of_transformers(tmp_path):
    paths = [small_model(name, tmp_path / name) for name in CONFIGS]
    tokens_T = torch.randint(0, VOCAB, (BOUNDS[-1],), generator=torch.Generator().manual_seed(5))
    (results,) = run_ranks(packed_logits, 1, paths, tokens_T, BOUNDS, timeout_s=150)
    for path, logits_TV in zip(paths, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected = [model(tokens_T[None, a:b]).logits[0] for a, b in pairwise(BOUNDS)]
        difference = (torch.from_numpy(logits_TV) - torch.cat(expected)).abs().max()
        assert difference < 1e-4, (path.name, difference)


def cases(folder: Path, names: list[str], num_ranks: int) -> list[tuple[Path, dict[str, ParallelConfig]]]:
    dense = {2: DENSE_LAYOUTS_OF_2, 4: DENSE_LAYOUTS_OF_4}[num_ranks]
    moe = {2: MOE_LAYOUTS_OF_2, 4: MOE_LAYOUTS_OF_4}[num_ranks]
    # megatron-core shards no experts that have biases.
    unsharded = {name: parallel for name, parallel in moe.items() if parallel.expert_tensor == 1}
    layouts = {name: (unsharded if name == "gpt_oss" else moe) if num_experts(name) else dense for name in names}
    return [(small_model(name, folder / name), layouts[name]) for name in names]


def test_weights_return_bit_for_bit_under_layouts_of_two_ranks(tmp_path):
    names = ["qwen3_moe", "glm4_moe", "qwen2", "llama_scaled_tied", "minimax_m2", "qwen3_next", "qwen3_5"]
    run_ranks(round_trip, 2, cases(tmp_path, names, 2), timeout_s=150)


def test_weights_return_bit_for_bit_under_layouts_of_four_ranks(tmp_path):
    run_ranks(round_trip, 4, cases(tmp_path, ["qwen3_moe"], 4), timeout_s=150)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_every_variant_return_bit_for_bit_under_every_layout(tmp_path, name, num_ranks):
    run_ranks(round_trip, num_ranks, cases(tmp_path, [name], num_ranks), timeout_s=150)


def routers_in_bf16(rank, world_size, port, path):
    """Types of what routers hold in a bfloat16 model, and their tensors as they are exported."""
    join(rank, world_size, port)
    chunks, family, hf_config = loaded_chunks(path, ParallelConfig(), Precision.bf16)
    model = unwrap(chunks[0])
    held = [*model.named_parameters(), *model.named_buffers()]
    types = {name.rsplit(".", 1)[1]: str(tensor.dtype) for name, tensor in held if ".router." in name}
    exported = {
        name: tensor.float().numpy().copy()
        for name, tensor in MegatronWeightSource(chunks, family, hf_config, dtype="bfloat16").tensors()
        if name.endswith(("e_score_correction_bias", ".gate.weight"))
    }
    dist.destroy_process_group()
    return types, exported


@pytest.mark.parametrize(("family", "layers", "weights"), [("glm4_moe", 3, "bfloat16"), ("minimax_m2", 4, "float32")])
def test_routers_keep_float32_in_a_bfloat16_model(tmp_path, family, layers, weights):
    """The bias that chooses experts in every model, the weights in those that are published so."""
    path = small_model(family, tmp_path / "hf")
    ((types, exported),) = run_ranks(routers_in_bf16, 1, path, timeout_s=90)
    buffers = {"expert_bias": "torch.float32", "local_tokens_per_expert": "torch.float32"}
    assert types == {"weight": f"torch.{weights}", **buffers}
    written = load_file(path / "model.safetensors")
    assert len(exported) == 2 * layers
    for name, value in exported.items():
        kind = weights if name.endswith("weight") else "float32"
        assert np.array_equal(value, written[name].to(getattr(torch, kind)).float().numpy()), name
