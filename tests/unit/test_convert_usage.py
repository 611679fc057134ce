"""Uses of `slimrl-tools convert` that it does not have are answered with what to write."""

from pathlib import Path

import pytest
from slimrl_tools.cli import app
from typer.testing import CliRunner


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["convert", *arguments], prog_name="slimrl-tools", terminal_width=400)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("file", "meant"),
    [
        (".metadata", ["megatron-to-hf"]),
        ("config.json", ["hf-to-megatron"]),
        (None, ["hf-to-megatron", "megatron-to-hf"]),
    ],
)
@pytest.mark.parametrize("options", [[], ["--tp", "8"]])
def test_a_conversion_without_its_direction_is_told_the_one_that_its_source_can_have(
    tmp_path: Path, file: str | None, meant: list[str], options: list[str]
):
    if file:
        (tmp_path / file).touch()
    said = refusal(*options, str(tmp_path), "OUT")
    assert "the direction is missing. Write " in said
    written = [name for name in ("hf-to-megatron", "megatron-to-hf") if f"slimrl-tools convert {name} SRC OUT" in said]
    assert written == meant


def test_a_conversion_of_a_gguf_file_without_its_direction_is_told_it():
    said = refusal("model.gguf", "OUT")
    assert "the direction is missing. Write slimrl-tools convert gguf-to-hf SRC OUT (a GGUF file)" in said


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--tp", "--tensor"),
        ("--tp=8", "--tensor"),
        ("--tensor-model-parallel-size", "--tensor"),
        ("--pp", "--pipeline"),
        ("--ep", "--expert"),
        ("--etp", "--expert-tensor"),
        ("--vpp", "--virtual-pipeline"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(option: str, meant: str):
    said = refusal("hf-to-megatron", "A", "OUT", option, "8")
    assert f"No such option: {option.partition('=')[0]}. Did you mean {meant}?" in said
    said = refusal("megatron-to-hf", "A", "OUT", option, "8")
    assert "Leave it out: it changes nothing that is written." in said


@pytest.mark.parametrize("option", ["--cp", "--zebra", "--dp"])
def test_an_option_that_means_nothing_here_is_refused(option: str):
    assert f"No such option: {option}" in refusal("hf-to-megatron", "A", "OUT", option, "8")


def test_a_slip_in_the_direction_is_answered_with_the_direction():
    assert "hf-to-megatron" in refusal("hf_to_megatron", "A", "OUT")
    assert "the direction is missing" not in refusal("hf_to_megatron", "A", "OUT")
