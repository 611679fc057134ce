"""What `slimrl resync bench` refuses, before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl.cli import app

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats 0: at least 1"),
        (["--gigabytes", "0"], "--gigabytes 0: must be greater than 0"),
        (["--gigabytes", "nan"], "--gigabytes nan: must be greater than 0"),
        (["--gigabytes", "inf"], "--gigabytes inf: must be less than 1000"),
        (["--family", "gpt2"], "no toy of family 'gpt2'; known: qwen3_moe"),
        (["--family", "qwen3_moe", "--gigabytes", "0.001"], "the smallest has 0.0"),
        (["resync.bucket_byts=1"], "resync.bucket_byts: no such key. Did you mean resync.bucket_bytes?"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["resync", "bench", str(RECIPE), f"run.dir={tmp_path / 'runs'}", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "runs").exists()


def test_it_is_said_which_family_is_measured_where_the_model_is_not_here(tmp_path):
    arguments = ["resync", "bench", str(RECIPE), f"model.path={tmp_path / 'none'}", "--gigabytes", "0.001"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"model.path: {tmp_path / 'none'} does not exist; measuring a qwen3_moe" in result.output
