"""Options of `slimrl resync estimate` reach the machine that is estimated."""

from dataclasses import fields

import pytest
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.estimates.resync import command as resync_estimate
from slimrl.estimates.resync.machine import Machine


def test_each_speed_that_is_given_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    told = {}
    monkeypatch.setattr(resync_estimate, "estimate_resync", lambda *_, **settings: told.update(settings))
    speeds = [field.name for field in fields(Machine) if field.name.endswith("_per_s")]
    given = {name: float(number) for number, name in enumerate(speeds, 1)}
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(
        app, ["resync", "estimate", "recipe.yaml", *options, "--gpus-per-node", "4", "--block-fp8"]
    )
    assert result.exit_code == 0, result.output
    assert told["machine"] == Machine(**given)
    assert (told["gpus_per_node"], told["block_fp8"], told["to_json"]) == (4, True, False)
