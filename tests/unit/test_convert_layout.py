"""The layout that `slimrl-tools convert hf-to-megatron` is given, against the model."""

import shutil
from pathlib import Path

import pytest
from toy_tools import run

QWEN3_30B = Path(__file__).parents[2] / "slimrl" / "models" / "hf_configs" / "Qwen3-30B-A3B.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensor 3", "--tensor: 3 does not divide the model's 32 attention heads. Use 2 or 4."),
        ("--expert 3", "--expert: 3 does not divide the model's 128 experts. Use 2 or 4."),
        ("--expert 48 --pipeline 3 --tensor 4", "--expert: 48 does not divide the model's 128 experts. Use 32 or 64."),
        ("--expert-tensor 5", "--expert-tensor: 5 does not divide the model's 768 columns of an expert. Use 4 or 6."),
    ],
)
def test_a_size_that_does_not_divide_is_answered_with_the_nearest_that_do(tmp_path, arguments, message):
    shutil.copy(QWEN3_30B, tmp_path / "config.json")
    assert message in run("convert", "hf-to-megatron", tmp_path, tmp_path / "out", *arguments.split(), code=2)
