"""The mapping of Qwen3-MoE against mbridge's, another converter between the same two formats, weight by weight."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.qwen3moe import Qwen3MoEBridge
from safetensors.torch import load_file
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.megatron_to_hf import megatron_to_hf
from slimrl_tools.convert.options import Options
from small_models import small_model
from transformers import AutoConfig

from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(120)]


class Bridge(Qwen3MoEBridge):
    """Without the configuration of a Transformer Engine model, which names and layouts do not depend on."""

    def _build_config(self):
        return SimpleNamespace(num_moe_experts=self.hf_config.num_experts)


def megatron_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every weight as slimrl lays it out, under the name that it has in Transformer Engine's layers."""
    config = read_hf_config(path)
    weight_map = family_of(config).weight_map(config)
    with SafetensorsFolder(path) as folder:
        return {entry.megatron[-1]: entry.to_megatron(folder.read) for entry in weight_map.entries}


def test_mbridge_lays_out_and_names_every_weight_as_slimrl_does(tmp_path):
    path = small_model("qwen3_moe", tmp_path / "hf")
    bridge = Bridge(AutoConfig.from_pretrained(path), dtype=torch.float32, parallel_states=ParallelStates())
    source = load_file(path / "model.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for name, weight in megatron_weights(path).items():
        # mbridge knows the norm before experts by its place, not by a fused name.
        theirs = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        hf_names = bridge._weight_name_mapping_mcore_to_hf(theirs)
        assert torch.equal(bridge._weight_to_mcore_format(theirs, [source[hf] for hf in hf_names]), weight), name
        exported.update(zip(*bridge._weight_to_hf_format(theirs, weight), strict=True))

    hf_to_megatron(path, tmp_path / "megatron", ParallelConfig(), Options())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", Options())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    ours = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(exported) == set(ours)
    assert not [name for name, tensor in exported.items() if not torch.equal(tensor, ours[name])]
