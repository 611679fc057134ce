"""Random models of a stated size."""

import pytest
import torch
from slimrl_tools.toy.toy_configs import TOYS

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.family import family_of
from slimrl.toys.sized_toy import sized_config, write_sized_toy


@pytest.mark.parametrize("family", TOYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("nbytes", [100_000_000, 1_000_000_000, 5_000_000_000])
def test_a_model_has_about_the_size_that_was_asked_for(family, dtype, nbytes):
    config = sized_config(family, nbytes, dtype, ParallelConfig())
    found = sum(spec_bytes(spec) for spec in family_of(config).weight_map(config).specs(dtype))
    assert found == pytest.approx(nbytes, rel=0.1)


def test_a_layout_divides_the_model_that_is_made_for_it():
    parallel = ParallelConfig(tensor=2, pipeline=3, virtual_pipeline=2, expert=3, expert_tensor=2)
    config = sized_config("qwen3_moe", 500_000_000, "bfloat16", parallel)
    assert config["num_hidden_layers"] % 6 == 0
    assert config["num_experts"] % 3 == 0
    assert config["moe_intermediate_size"] % 4 == 0
    assert config["num_key_value_heads"] % 2 == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_width_divides_by_both_tensor_parallel_sizes(family):
    parallel = ParallelConfig(tensor=3, expert_tensor=5)
    for nbytes in (500_000_000, 700_000_000, 1_000_000_000, 1_300_000_000):
        config = sized_config(family, nbytes, "bfloat16", parallel)
        width = config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]
        assert width % (32 * 3 * 5) == 0
    assert (config["num_attention_heads"] % config["num_key_value_heads"], config["num_key_value_heads"] % 3) == (0, 0)


def test_a_size_below_the_smallest_model_is_refused():
    with pytest.raises(ValueError, match=r"the smallest has 0\.0\d+ GB in float32"):
        sized_config("qwen3_moe", 1_000_000, "float32", ParallelConfig())
    with pytest.raises(ValueError, match="no toy of family 'gpt2'; known: qwen3_moe"):
        sized_config("gpt2", 1_000_000_000, "float32", ParallelConfig())


def test_the_weights_are_written_in_the_dtype_of_the_config(tmp_path):
    config = sized_config("qwen3", 30_000_000, "bfloat16", ParallelConfig())
    nbytes = write_sized_toy(config, tmp_path / "model", seed=0)
    with SafetensorsFolder(tmp_path / "model") as folder:
        assert {spec.dtype for spec in folder.specs.values()} == {"bfloat16"}
        assert sum(map(spec_bytes, folder.specs.values())) == nbytes
        norm = folder.read("model.norm.weight", (slice(0, config["hidden_size"]),))
        assert torch.equal(norm, torch.ones_like(norm))
