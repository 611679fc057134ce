"""`slimrl simulate` on a recipe as it is shipped, against `slimrl plan`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl.cli import app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

RECIPE = str(Path(__file__).parents[2] / "recipes/qwen3/qwen3_8b_gspo_disaggregated.yaml")


def rows_of(folder: Path, *arguments: object) -> list[dict]:
    result = CliRunner().invoke(
        app, ["simulate", RECIPE, *map(str, arguments), "--steps", "4", "--json-file", str(folder / "out.json")]
    )
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text())["rows"]


def test_a_synchronous_step_is_that_of_the_plan(tmp_path):
    plan = json.loads(CliRunner().invoke(app, ["plan", RECIPE, "--json"]).stdout)["step"]
    sync, *_, shared = rows_of(tmp_path, "--decode-efficiency", 1)
    assert (sync["mode"], sync["gpus"], sync["shared_gpus"]) == ("sync", 16, False)
    parts = ("logprobs", "training", "communication", "host_optimizer")
    assert sync["train_s"] == pytest.approx(sum(plan[part] for part in parts))
    assert sync["resync_s"] == pytest.approx(plan["resync"])
    assert sync["trajectory_s"]["p50"] == pytest.approx(plan["rollout_at_least"], rel=1e-3)
    assert sync["seconds"] == pytest.approx(4 * sum(plan.values()), rel=1e-3)
    assert (shared["mode"], shared["gpus"], shared["trainer_ranks"], shared["num_engines"]) == ("sync", 16, 16, 8)
    assert shared["train_s"] == pytest.approx(sync["train_s"] / 2, rel=0.1)
    assert shared["shared_gpus"]


@pytest.mark.full
def test_more_gpus_are_split_as_the_recipes_and_the_best_split_is_found(tmp_path):
    rows = rows_of(tmp_path, "--gpus", "16,32", "--scale-batch", "--turn-tokens", "lognormal:600:0.7")
    assert [row["gpus"] for row in rows] == [16] * 7 + [32] * 7
    assert [row["trainer_ranks"] for row in rows] == [8] * 6 + [16] * 7 + [32]
    assert rows[7]["train_s"] == pytest.approx(rows[0]["train_s"], rel=0.1), "twice the batch on twice the ranks"
    best, *others = rows_of(tmp_path, "--suggest", 16, "rollout.mode=async", "rollout.max_staleness=4")
    splits = {row["trainer_ranks"]: row for row in [best, *others]}
    assert {ranks: row["num_engines"] for ranks, row in splits.items()} == {
        ranks: (16 - ranks) // 2 for ranks in splits
    }
    assert all(best["steps_per_hour"] >= row["steps_per_hour"] for row in others if not row["problems"])
