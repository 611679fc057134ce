"""Options that several commands of `slimrl-tools` have mean the same in all of them."""

import pytest
from slimrl_tools.cli import app
from slimrl_tools.command_options import torch_dtype, torch_dtype_or_keep
from typer.testing import CliRunner

from slimrl.config.schema.precision import Precision


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("convert hf-to-megatron A OUT", "keep, bf16, fp16, fp32"),
        ("convert megatron-to-hf A OUT", "keep, bf16, fp16, fp32"),
        ("average A B OUT", "keep, bf16, fp16, fp32"),
        ("dequantize A OUT", "bf16, fp16, fp32"),
    ],
)
def test_every_command_takes_dtypes_by_the_same_names(command, choices):
    result = CliRunner().invoke(app, [*command.split(), "--dtype", "bfloat16"])
    assert result.exit_code == 2
    assert result.output == f"--dtype bfloat16: one of {choices}\n"


def test_dtypes_have_the_names_that_recipes_use():
    assert [torch_dtype("--dtype", precision.value) for precision in Precision] == ["float32", "bfloat16"]
    assert torch_dtype_or_keep("--dtype", "fp16") == "float16"
    assert torch_dtype_or_keep("--dtype", "keep") is None
