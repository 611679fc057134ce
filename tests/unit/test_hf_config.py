"""What is read from a config.json, and what is written into one."""

import pytest

from slimrl.models.hf_config import config_for_planning, dtype_name, plain_config, published_config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_of_plain_weights_names_their_dtype_as_its_release_of_transformers_does(key):
    config = {"hidden_size": 8, key: "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    assert plain_config(config, "float32") == {"hidden_size": 8, key: "float32"}
    assert plain_config(config) == {"hidden_size": 8, key: "bfloat16"}
    assert "quantization_config" in config


def test_a_config_without_a_dtype_gets_one():
    assert plain_config({"hidden_size": 8}, "bfloat16") == {"hidden_size": 8, "dtype": "bfloat16"}
    assert dtype_name({"torch_dtype": "torch.bfloat16"}) == "bfloat16"


def test_a_checkpoint_that_is_not_here_stands_for_the_published_model_of_its_name(tmp_path):
    published = published_config("Qwen3-8B")
    assert config_for_planning(tmp_path / "Qwen3-8B") == (
        published,
        f"Qwen3-8B as published, for {tmp_path / 'Qwen3-8B'} is not here",
    )
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text('{"model_type": "qwen3"}')
    assert config_for_planning(tmp_path / "Qwen3-8B") == ({"model_type": "qwen3"}, str(tmp_path / "Qwen3-8B"))


def test_a_checkpoint_that_is_neither_here_nor_published_is_refused_with_the_names_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"other: no such folder, and 'other' is none of .*Qwen3-30B-A3B"):
        config_for_planning(tmp_path / "other")
