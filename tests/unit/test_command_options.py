"""Options that several commands of `slimrl-tools` have mean the same in all of them."""

import builtins
import re
from collections.abc import Iterator
from typing import Any

import pytest
from slimrl_tools.cli import app
from slimrl_tools.command_options import torch_dtype, torch_dtype_or_keep
from typer.main import get_command
from typer.testing import CliRunner

from slimrl.cli import app as slimrl
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
    assert torch_dtype_or_keep("fp16") == "float16"
    assert torch_dtype_or_keep("keep") is None


def parameters(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each with the command that has it."""
    for below, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{name} {below}")
    yield from ((name, each) for each in command.params)


@pytest.mark.parametrize("name", ["slimrl", "slimrl-tools"])
def test_every_option_says_what_it_is(name):
    found = list(parameters(get_command({"slimrl": slimrl, "slimrl-tools": app}[name]), name))
    assert len(found) > 50
    assert [f"{command} {each.opts}" for command, each in found if not each.help] == []


def test_json_is_printed_and_a_json_file_is_written():
    for name, command in (("slimrl", slimrl), ("slimrl-tools", app)):
        for path, each in parameters(get_command(command), name):
            if "--json" in each.opts:
                assert each.is_flag, path
            if "--json-file" in each.opts:
                assert not each.is_flag, path


WRONG = [
    ("toy", "no_family", "OUT"),
    ("toy", "qwen3_moe", "OUT", "--kv-heads", "3"),
    ("quantize", "nowhere", "OUT"),
    ("quantize", "SRC", "OUT", "--format", "int4"),
    ("quantize", "SRC", "SRC"),
    ("quantize", "SRC", "no/such/folder/OUT"),
    ("dequantize", "SRC", "OUT", "--dtype", "bfloat16"),
    ("average", "SRC", "nowhere", "OUT"),
    ("average", "SRC", "SRC", "OUT", "--weights", "a,b"),
    ("slice-layers", "nowhere", "OUT", "--layers", "2"),
    ("convert", "hf-to-megatron", "nowhere", "OUT"),
    ("convert", "megatron-to-hf", "SRC", "no/such/folder/OUT"),
    ("verify", "SRC", "nowhere"),
    ("verify", "SRC", "SRC", "--logits-dtype", "fp8"),
    ("diff-config", "SRC", "no_recipe.yaml"),
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_argument_is_refused_before_the_modules_of_the_command_are_imported(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SRC").mkdir()
    imported, real = [], builtins.__import__

    def noted(name: str, *more: Any) -> Any:
        imported.append(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", noted)
    result = CliRunner().invoke(app, arguments)
    monkeypatch.undo()
    assert result.exit_code == 2, result.output
    slow = {name for name in imported if name.split(".")[0] in ("torch", "transformers", "megatron", "safetensors")}
    slow |= {name for name in imported if re.fullmatch(r"slimrl_tools\.(derive|convert|verify|inspect|toy)\.\w+", name)}
    allowed = {"slimrl_tools.convert.output_folder", "slimrl_tools.convert.options", "slimrl_tools.toy.toy_configs"}
    assert slow - allowed == set()
    assert not (tmp_path / "OUT").exists()
