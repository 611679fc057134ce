"""What a recipe reads from the environment is written down as the reference, wherever settings are written down."""

import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.interpolation import FromEnvironment
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.run import TrackingConfig, WandbMode
from slimrl.config.show import changed_settings, dump_resolved, resolved_dict, show
from slimrl.observability.progress import Progress
from slimrl.observability.trackers import Trackers
from slimrl.runtime import start

SECRET = "s3cr3t-\"value's-0123456789"

GIVEN = """\
steps: 3
run: {name: demo}
model: {path: models/toy}
trainer:
  max_tokens_per_rank: 512
  optimizer: {lr: 1e-6}
  env: {HF_TOKEN: "${oc.env:SLIMRL_TEST_SECRET}"}
algorithm: {max_logprob_mismatch: 1e-4}
rollout:
  max_trajectory_tokens: 256
  sglang:
    served_model_name: ${oc.env:SLIMRL_TEST_SECRET}
    prompt_tokens_buckets: ["a=${oc.env:SLIMRL_TEST_SECRET}/a", plain]
  env: {HF_TOKEN: "${oc.env:SLIMRL_TEST_SECRET}"}
agent:
  system_prompt: before ${tracking.wandb_project} after
reward: {function: "tasks.demo:reward"}
data:
  train: ${run.name}.jsonl
  eval: {held: "${oc.select:rollout.sglang.served_model_name}"}
tracking:
  wandb_project: \\${not read} ${rollout.sglang.served_model_name}
"""
"""In a value of its own, within a text, in a list, through one setting, through two, and through a resolver."""

REFERENCES = {
    "rollout.sglang.served_model_name": "${oc.env:SLIMRL_TEST_SECRET}",
    "rollout.sglang.prompt_tokens_buckets": ["a=${oc.env:SLIMRL_TEST_SECRET}/a", "plain"],
    "rollout.env.HF_TOKEN": "${oc.env:SLIMRL_TEST_SECRET}",
    "trainer.env.HF_TOKEN": "${oc.env:SLIMRL_TEST_SECRET}",
    "agent.system_prompt": "before ${tracking.wandb_project} after",
    "data.eval.held": "${oc.select:rollout.sglang.served_model_name}",
    "tracking.wandb_project": "\\${not read} ${rollout.sglang.served_model_name}",
}


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMRL_TEST_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(GIVEN)


def load(*overrides: str) -> LoadedRecipe:
    return load_recipe("recipe.yaml", overrides)


def at(nested: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        nested = nested[name]
    return nested


def texts(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def test_the_run_gets_the_values(tmp_path: Path):
    recipe = load().recipe
    assert recipe.rollout.sglang == {"served_model_name": SECRET, "prompt_tokens_buckets": [f"a={SECRET}/a", "plain"]}
    assert recipe.tracking.wandb_project == f"${{not read}} {SECRET}"
    assert recipe.agent.system_prompt == f"before ${{not read}} {SECRET} after"
    assert recipe.data.eval == {"held": SECRET}
    assert recipe.data.train == "demo.jsonl"


def test_references_are_written_in_place_of_values_and_others_are_resolved():
    written = resolved_dict(load())
    for key, reference in REFERENCES.items():
        assert at(written, key) == reference
    assert at(written, "data.train") == "demo.jsonl"
    shown = {key: value for key, value, _ in show(load())}
    assert shown["rollout.sglang.served_model_name"] == "${oc.env:SLIMRL_TEST_SECRET}"
    assert SECRET not in str(shown) + dump_resolved(load())


def test_who_takes_the_resolved_recipe_up_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch):
    first = load("seed=${oc.env:SLIMRL_TEST_SEED,4}")
    Path("resolved.yaml").write_text(dump_resolved(first))
    again = load_recipe("resolved.yaml")
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(first.recipe)
    assert again.recipe.seed == 4
    monkeypatch.setenv("SLIMRL_TEST_SECRET", "rotated")
    monkeypatch.setenv("SLIMRL_TEST_SEED", "5")
    rotated = load_recipe("resolved.yaml")
    assert (rotated.recipe.data.eval, rotated.recipe.seed) == ({"held": "rotated"}, 5)
    assert resolved_dict(rotated) == resolved_dict(first)


def test_a_rotated_secret_is_no_changed_setting_and_none_is_shown_in_one(monkeypatch: pytest.MonkeyPatch):
    before = yaml.safe_load(dump_resolved(load()))
    monkeypatch.setenv("SLIMRL_TEST_SECRET", "rotated-value")
    assert list(changed_settings(before, resolved_dict(load()))) == []
    # A run folder in which the value was written down.
    before["rollout"]["sglang"] = {"served_model_name": SECRET, "prompt_tokens_buckets": [f"{SECRET}/a", "plain"]}
    changes = list(changed_settings(before, resolved_dict(load("steps=4"))))
    assert changes == [
        "rollout.sglang.prompt_tokens_buckets: (another value) -> ['a=${oc.env:SLIMRL_TEST_SECRET}/a', 'plain']",
        "rollout.sglang.served_model_name: (another value) -> ${oc.env:SLIMRL_TEST_SECRET}",
        "steps: 3 -> 4",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.num_engines=${oc.env:SLIMRL_TEST_SECRET}",
         "rollout.num_engines: expected int, got '${oc.env:SLIMRL_TEST_SECRET}'. The value from the environment"),
        ("rollout.num_engines=${rollout.sglang.served_model_name}",
         "rollout.num_engines: expected int, got '${rollout.sglang.served_model_name}'. The value from"),
        ("resync.verify=${oc.env:SLIMRL_TEST_SECRET}", "resync.verify: '${oc.env:SLIMRL_TEST_SECRET}' is not one of"),
        ("rollout.sglang.page_size=${oc.env:SLIMRL_TEST_SECRET}",
         "rollout.sglang.page_size: expected None | int, got '${oc.env:SLIMRL_TEST_SECRET}'"),
        ("data.train=${run.${oc.env:SLIMRL_TEST_SECRET}}", "data.train: '${run.${oc.env:SLIMRL_TEST_SECRET}}': "),
        ("seed=${oc.decode:'[${oc.env:SLIMRL_TEST_SECRET}'}", "seed: "),
    ],
)  # fmt: skip
def test_no_error_shows_a_secret(override: str, said: str):
    with pytest.raises(RecipeError) as caught:
        load(override)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET.partition('"')[0] not in str(caught.value)


def test_a_rule_that_shows_a_value_shows_the_reference_and_numbers_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIMRL_TEST_NUMBER", "1234567")
    loaded = load("seed=${oc.env:SLIMRL_TEST_NUMBER}")
    assert loaded.problem("data.eval.held", f"{SECRET}: no such file; {SECRET!r}; 1234567 of 12").message == (
        "${oc.env:SLIMRL_TEST_SECRET}: no such file; '${oc.env:SLIMRL_TEST_SECRET}'; 1234567 of 12"
    )


def test_of_two_values_of_which_one_begins_like_the_other_none_is_shown():
    environment = FromEnvironment(variables={"SHORT": "abcdef", "LONG": "abcdef-and-more"})
    assert environment.hide("abcdef-and-more abcdef") == "${oc.env:LONG} ${oc.env:SHORT}"


def test_short_values_and_numbers_are_no_secrets():
    environment = FromEnvironment(variables={"FIVE": "on-on", "SIX": "on_off", "NUMBER": "-12.5e+30"})
    assert environment.hide("on-on on_off -12.5e+30") == "on-on ${oc.env:SIX} -12.5e+30"


def test_config_show_prints_references():
    result = CliRunner().invoke(app, ["config", "show", "recipe.yaml"])
    assert result.exit_code == 0
    assert "${oc.env:SLIMRL_TEST_SECRET}" in result.output
    assert SECRET not in result.output


class FakeWandbRun:
    def define_metric(self, *about, **how) -> None: ...

    def finish(self, exit_code: int) -> None: ...


def test_no_file_of_a_run_s_folder_nor_wandb_has_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, Any]] = []
    wandb = SimpleNamespace(Settings=dict, init=lambda **settings: given.append(settings) or FakeWandbRun())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sys, "argv", ["slimrl", "train", "recipe.yaml", f"agent.system_prompt={SECRET}"])
    handlers = logging.getLogger().handlers[:]
    for resume in (False, True):
        loaded = load(f"run.dir={tmp_path / 'runs'}")
        with start.open_run(loaded, Progress(0), resume=resume) as folder:
            try:
                raise ValueError(f"the key {SECRET} was refused, {SECRET!r}")
            except ValueError:
                logging.getLogger("test").exception("with %s", SECRET)
            online = TrackingConfig(wandb=WandbMode.online)
            with Trackers(folder, online, resolved_dict(loaded), keep_through_step=0):
                pass
    logging.basicConfig(handlers=handlers, force=True)
    files = dict(texts(tmp_path / "runs"))
    assert {path.name for path in files} >= {"config.yaml", "config.resumed.yaml", "provenance.json", "driver.log"}
    for path, content in files.items():
        assert SECRET.encode() not in content, path
        assert b"0123456789" not in content, path
    log = (folder.logs / "driver.log").read_text()
    assert log.count("with ${oc.env:SLIMRL_TEST_SECRET}") == 2
    assert "Traceback" in log
    assert len(given) == 2
    assert SECRET not in str(given)
    assert at(given[0]["config"], "rollout.sglang.served_model_name") == "${oc.env:SLIMRL_TEST_SECRET}"


def test_omegaconf_resolves_variables_as_before_once_a_recipe_is_read():
    load()
    plain = OmegaConf.create({"a": "${oc.env:SLIMRL_TEST_SECRET}", "b": "${oc.env:SLIMRL_ABSENT,7}"})
    assert (plain.a, plain.b) == (SECRET, "7")
