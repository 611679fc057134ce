"""Runs of `slimrl-tools` in this process, and the size of the toys that they work on."""

from slimrl_tools.cli import app
from slimrl_tools.toy.toy_configs import ToySize
from typer.testing import CliRunner

SMALL = ToySize(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, moe_intermediate=16)


def run(*arguments, code=0) -> str:
    """What a command that ends with this exit code prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output
