"""A run on data and a model as users have them: a model in the Hub's cache, Parquet with other columns, weights."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from cli_runs import RECIPES, make_workspace, succeed
from fake_hub import COMMIT

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

RUN_S = 400.0


def test_a_model_of_the_cache_is_trained_on_two_files_with_weights(tmp_path: Path, monkeypatch):
    workspace = make_workspace(tmp_path / "work")
    cache = tmp_path / "home" / "hub" / "models--org--toy"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir()
    (workspace.path / "model").rename(cache / "blobs")
    for blob in (cache / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    rows = [json.loads(line) for line in (workspace.path / "data" / "train.jsonl").read_text().splitlines()]
    table = [{"problem": row["prompt"], "reward_model": {"ground_truth": str(row["label"])}} for row in rows]
    table[3]["problem"] = "very " * 200 + "long?"
    files = {name: tmp_path / f"{name}.parquet" for name in ("one", "two")}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), files["one"])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table[5:7]), files["two"])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = [
        *("model.path=org/toy", f"data.train={files['one']}", f"data.more={{two: {files['two']}}}"),
        *("data.keys={prompt: problem, label: reward_model.ground_truth}", "data.eval.heldout=null"),
        *("data.weights={train: 3, two: 1}", "data.max_prompt_tokens=200", "steps=2"),
    ]
    recipe = str(RECIPES / "gspo_calculator.yaml")
    run = succeed("train", recipe, *workspace.overrides(*settings), timeout_s=RUN_S)
    assert "data.train: left out 1 of 32 prompts, longer than 200 tokens" in run.stdout + run.stderr
    folder = workspace.run_folder("gspo")
    steps = read_metrics(folder.metrics)
    assert [step.get("data/left_out_prompts") for step in steps if step["step"] > 0] == [1, 1]
    assert yaml.safe_load(folder.config.read_text())["model"]["path"] == str(snapshot)
    for number in (1, 2):
        groups = [json.loads(line)["group_id"] for line in folder.sample_file(number).read_text().splitlines()]
        # Three of four are of the first file.
        assert [group.startswith("two/") for group in groups].count(True) == 1
        assert len(groups) == 4
    assert not [file for file in folder.export.iterdir() if file.is_symlink()]
    assert (folder.export / "config.json").is_file()
