"""Every Megatron parameter of every model has its place in the family's weight map, in both spellings of the layers."""

import re
from decimal import Decimal

import pytest
import torch
import torch.distributed as dist
from published_sizes import PUBLISHED_SIZES
from ranks import run_ranks
from shard_shapes import shard_shape
from small_models import CONFIGS
from transformers import AutoConfig
from weight_cases import join, trainer_config

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, published_names
from slimrl.trainer.build import _gpt, transformer_config
from slimrl.trainer.weights import local_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

QUICK = ["Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen3-8B", "Qwen3-30B-A3B", "Moonlight-16B-A3B"]
SUPPORTED = published_names()


def on_meta(hf_config):
    """The model of a config as one rank holds it whole, MTP layers included, without memory."""
    parallel = ParallelConfig()
    model = family_of(hf_config).megatron_config(hf_config)
    trainer = trainer_config(parallel, Precision.bf16)
    trainer.megatron["perform_initialization"] = False
    with torch.device("meta"):
        return _gpt(parallel, model, transformer_config(trainer, model, mtp=True), 0)


def full_size_coverage(rank, world_size, port, names):
    """(entries met, entries of the map, parameters without MTP layers) of each published model."""
    join(rank, world_size, port)
    torch.cuda.current_device = lambda: torch.device("meta")
    results = []
    for name in names:
        hf_config = published_config(name)
        weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
        held = local_weights([on_meta(hf_config)], weight_map)
        wrong = [i for i, tensor in held if tuple(tensor.shape) != shard_shape(weight_map.entries[i], 1)]
        assert not wrong, [weight_map.entries[i].megatron[0] for i in wrong]
        count = sum(tensor.numel() for i, tensor in held if not weight_map.entries[i].rule.mtp)
        results.append((sorted(index for index, _ in held), len(weight_map.entries), count))
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("names", [QUICK, pytest.param(sorted(set(SUPPORTED) - set(QUICK)), marks=pytest.mark.full)])
def test_every_megatron_parameter_of_the_published_models_is_covered_exactly_once(names):
    (results,) = run_ranks(full_size_coverage, 1, names, timeout_s=550)
    for name, (indices, num_entries, count) in zip(names, results, strict=True):
        assert indices == list(range(num_entries)), name
        published_b = PUBLISHED_SIZES[name].total_b
        # Kimi-K2's authors round to a trillion, those of the smallest models to a tenth of a billion.
        half_digit_b = 0.5 * 10.0 ** Decimal(str(published_b)).as_tuple().exponent
        within_b = 30 if name.startswith("Kimi-K2") else max(0.01 * published_b, min(half_digit_b, 0.05))
        assert count / 1e9 == pytest.approx(published_b, abs=within_b), name


def transformer_engine_name(name: str, *, latent: bool, dense_layers: set[str], delta_layers: set[str]) -> str:
    """What Transformer Engine's spec calls a parameter of Megatron's own layers.

    It keeps a norm in the linear layer behind it, where there is one: not before latent attention, which begins with
    two, and not before experts. It holds a layer's experts as one module.
    """
    layer = re.match(r"(decoder\.layers\.\d+|mtp\.layers\.\d+\.mtp_model_layer)\.", name)
    if not layer:
        return name
    rest = name.removeprefix(layer[0])
    if rest == "input_layernorm.weight" and not latent:
        rest = f"self_attention.{'in_proj' if layer[1] in delta_layers else 'linear_qkv'}.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and layer[1] in dense_layers:
        rest = "mlp.linear_fc1.layer_norm_weight"
    elif latent:
        rest = re.sub(
            r"self_attention\.(q|kv)_layernorm\.weight", r"self_attention.linear_\1_up_proj.layer_norm_weight", rest
        )
    rest = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", rest)
    return layer[0] + rest


def both_spellings(rank, world_size, port, configs):
    """By model, (local name, its place in the map, the place of Transformer Engine's name)."""
    join(rank, world_size, port)
    torch.cuda.current_device = lambda: torch.device("meta")
    results = {}
    for name, hf_config in configs.items():
        names = [parameter_name for parameter_name, _ in on_meta(hf_config).named_parameters()]
        dense = {parameter_name.split(".mlp.")[0] for parameter_name in names if ".mlp.linear_fc1." in parameter_name}
        delta = {parameter_name.split(".self_att")[0] for parameter_name in names if ".in_proj." in parameter_name}
        weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
        latent = "kv_lora_rank" in hf_config
        results[name] = [
            (local, weight_map.index_of(local), weight_map.index_of(fused))
            for local in names
            for fused in [transformer_engine_name(local, latent=latent, dense_layers=dense, delta_layers=delta)]
        ]
    dist.destroy_process_group()
    return results


def test_transformer_engine_s_names_lead_to_the_same_entries(tmp_path):
    configs = {name: AutoConfig.for_model(**config).to_dict() for name, config in CONFIGS.items()}
    for config in configs.values():
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 1
    for name in ("qwen3_5", "qwen3_5_moe"):
        configs[name]["mtp_num_hidden_layers"] = 1
    # Megatron builds the layer for multi-token prediction only behind one with attention.
    configs["qwen3_next_mixed"]["num_nextn_predict_layers"] = 0
    (results,) = run_ranks(both_spellings, 1, configs, timeout_s=90)
    assert results.keys() == configs.keys()
    for name, places in results.items():
        assert len(places) > 10
        for local, place, fused in places:
            assert place is not None, (name, local)
            assert fused == place, (name, local)
