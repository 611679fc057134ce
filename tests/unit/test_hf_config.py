"""What is read from a config.json, and what is written into one."""

import pytest

from slimrl.models.hf_config import dtype_name, plain_config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_of_plain_weights_names_their_dtype_as_its_release_of_transformers_does(key):
    config = {"hidden_size": 8, key: "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    assert plain_config(config, "float32") == {"hidden_size": 8, key: "float32"}
    assert plain_config(config) == {"hidden_size": 8, key: "bfloat16"}
    assert "quantization_config" in config


def test_a_config_without_a_dtype_gets_one():
    assert plain_config({"hidden_size": 8}, "bfloat16") == {"hidden_size": 8, "dtype": "bfloat16"}
    assert dtype_name({"torch_dtype": "torch.bfloat16"}) == "bfloat16"
