"""An evaluation with real engines that is interrupted goes on and ends as if it had not been."""

import json
from pathlib import Path

import pytest
from cli_runs import RECIPES, CliRun, make_workspace, succeed

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

RUN_S = 300.0
FILES = ("items.jsonl", "summary.json", "evaluation.json")


def test_an_evaluation_that_is_interrupted_ends_as_if_it_had_not_been(tmp_path: Path):
    workspace = make_workspace(tmp_path)
    arguments = [
        "eval", str(RECIPES / "gspo_calculator.yaml"), *workspace.overrides(), "--checkpoint", str(tmp_path / "model"),
        f"data.eval.train={tmp_path / 'data' / 'train.jsonl'}", "eval.samples_per_prompt=2", "eval.pass_at=[1,2]",
        "rollout.eval_sampling.temperature=1.0", "rollout.num_engines=1",
        # One after the other, so that some are left when the first few are there.
        "rollout.max_concurrency_per_engine=1",
    ]  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "out"
    succeed(*arguments, "--out", str(whole), timeout_s=RUN_S)
    items = [json.loads(line) for line in (whole / "items.jsonl").read_text().splitlines()]
    assert [(item["set"], item["sample"]) for item in items] == [("heldout", 0), ("heldout", 1)] * 8 + [
        ("train", 0), ("train", 1),
    ] * 32  # fmt: skip
    # Two samples of a prompt differ.
    assert items[0]["prompt_id"] == items[1]["prompt_id"]
    assert items[0]["messages"] != items[1]["messages"]

    cut = CliRun([*arguments, "--out", str(out)])
    try:
        cut.wait_until(lambda: num_items(out) >= 6, RUN_S)
        cut.interrupt_as_terminal()
        assert cut.wait(RUN_S) == 1
        assert not cut.left()
    finally:
        cut.close()
    left = num_items(out)
    assert 6 <= left < 80
    assert not (out / "summary.json").exists()
    # A process that is killed while it writes leaves a part of a line.
    (out / "items.jsonl").write_bytes((out / "items.jsonl").read_bytes()[:-30])
    again = succeed(*arguments, "--out", str(out), timeout_s=RUN_S)
    assert f"{left - 1} of 80 trajectories are there already" in again.stdout
    for name in FILES:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def num_items(out: Path) -> int:
    path = out / "items.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
