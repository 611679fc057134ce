"""What is read from a config.json, and what is written into one."""

import pytest

from slimrl.models.hf_config import (
    config_for_planning,
    dtype_name,
    head_dim,
    partial_rotary_factor,
    plain_config,
    published_config,
    read_hf_config,
    required,
    rope_scaling,
    rope_theta,
)


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
        f"Qwen3-8B as published, in bfloat16, for {tmp_path / 'Qwen3-8B'} is not here",
    )
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text('{"model_type": "qwen3"}')
    assert config_for_planning(tmp_path / "Qwen3-8B") == ({"model_type": "qwen3"}, str(tmp_path / "Qwen3-8B"))


def test_a_checkpoint_that_is_neither_here_nor_published_is_refused_with_the_names_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"other: no such folder, and 'other' is none of .*Qwen3-30B-A3B"):
        config_for_planning(tmp_path / "other")


def test_the_first_key_that_is_there_and_not_null_counts():
    assert required({"a": None, "b": 0, "c": 3}, "a", "b", "c") == 0
    with pytest.raises(ValueError, match=r"config\.json: no a or d$"):
        required({"a": None}, "a", "d")
    sizes = {"hidden_size": 96, "num_attention_heads": 6}
    assert [head_dim(sizes), head_dim(sizes | {"head_dim": None}), head_dim(sizes | {"head_dim": 32})] == [16, 16, 32]
    assert dtype_name({}) == "float32"
    assert dtype_name({"dtype": "float16", "torch_dtype": "bfloat16"}) == "float16"


def test_positions_are_read_as_either_release_of_transformers_writes_them():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5}
    new = {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    }
    for config in (old, new, old | new):
        assert rope_theta(config) == 5e5
        assert rope_scaling(config) == {"rope_type": "yarn", "factor": 4.0}
        assert partial_rotary_factor(config) == 0.5
    plain = {"rope_theta": 1e4, "rope_scaling": None}
    assert (rope_scaling(plain), partial_rotary_factor(plain), partial_rotary_factor(plain, 0.25)) == (
        {"rope_type": "default"}, 1.0, 0.25,
    )  # fmt: skip
    both = {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}}
    assert partial_rotary_factor(both) == 0.75
    with pytest.raises(ValueError, match="no rope_theta"):
        rope_theta({"rope_parameters": {"rope_type": "default"}})


def test_a_name_that_is_not_published_has_no_config():
    with pytest.raises(ValueError, match=r"no published config 'Qwen9'; known: .*Qwen3-8B"):
        published_config("Qwen9")


@pytest.mark.parametrize(("metadata", "said"), [(False, "is needed$"), (True, "and this is one of Megatron's$")])
def test_a_folder_without_a_config_is_refused_with_what_it_is(tmp_path, metadata, said):
    if metadata:
        (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match=f"no such file; a Hugging Face checkpoint folder .*{said}"):
        read_hf_config(tmp_path)
