"""Rules of `rollout.mode`: what it excludes is refused, and what it leaves unaccounted for is said."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.async_rules import mode_violations, mode_warnings
from slimrl.config.load import read_recipe
from slimrl.config.schema.algorithm import CorrectionLevel, OldPolicy, RoutingReplay
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.config.schema.rollout import RolloutMode, TooOld

COLOCATED = Path(__file__).parents[2] / "recipes" / "qwen3_moe" / "qwen3_30b_a3b_gspo.yaml"
TOY = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


def recipe(mode: RolloutMode) -> Recipe:
    made = Recipe()
    made.rollout.mode = mode
    made.algorithm.correction.level = CorrectionLevel.token
    return made


@pytest.mark.parametrize("mode", RolloutMode)
def test_each_mode_is_accepted(mode):
    assert not [*mode_violations(recipe(mode)), *mode_warnings(recipe(mode))]


def change(made: Recipe, key: str, value: object) -> Recipe:
    *sections, name = key.split(".")
    target = made
    for section in sections:
        target = getattr(target, section)
    setattr(target, name, value)
    return made


@pytest.mark.parametrize(
    ("mode", "key", "value", "refused", "said"),
    [
        (
            "sync",
            "rollout.max_staleness",
            4,
            "rollout.max_staleness",
            "only rollout.mode async and rollout.oversample read it",
        ),
        ("one_step_off", "rollout.too_old", TooOld.wait, "rollout.too_old", "and the mode is one_step_off"),
        ("sync", "rollout.oversample", 1.5, "rollout.oversample", "Use resync.pause abort"),
        ("async_", "algorithm.routing_replay", RoutingReplay.rollout, "resync.pause", "Use abort or in_place"),
        ("async_", "rollout.oversample", 1.5, "rollout.oversample", "1.5 is for rollout.mode sync"),
        ("async_", "deterministic", True, "rollout.mode", "async cannot be repeated bit by bit"),
        ("one_step_off", "rollout.colocated", True, "rollout.mode", "one_step_off needs engines that sample while"),
        ("sync", "resync.flush_cache", False, "resync.flush_cache", "and rollout.mode sync has none"),
        (
            "one_step_off",
            "resync.flush_cache",
            False,
            "resync.flush_cache",
            "and rollout.mode one_step_off has none",
        ),
        ("async_", "resync.flush_cache", False, "resync.flush_cache", "Use abort or in_place"),
        (
            "async_",
            "algorithm.dynamic_sampling.oversampling",
            1.5,
            "algorithm.dynamic_sampling.oversampling",
            "1.5 is of the rollouts of a step, and rollout.mode async has none",
        ),
        (
            "async_",
            "algorithm.dynamic_sampling.refill",
            RefillMode.value,
            "algorithm.dynamic_sampling.refill",
            "Use order",
        ),
    ],
)
def test_what_a_mode_excludes_is_refused(mode, key, value, refused, said):
    [(found, message)] = mode_violations(change(recipe(RolloutMode[mode]), key, value))
    assert found == refused
    assert said in message


@pytest.mark.parametrize("pause", [PauseMode.abort, PauseMode.in_place])
def test_caches_are_kept_by_engines_of_their_own(pause):
    made = change(recipe(RolloutMode.async_), "resync.flush_cache", False)
    made.resync.pause = pause
    assert not list(mode_violations(made))
    made.rollout.colocated = True
    assert "resync.flush_cache" in [key for key, _ in mode_violations(made)]


@pytest.mark.parametrize(
    ("key", "value", "warned", "said"),
    [
        ("rollout.too_old", TooOld.train, "rollout.too_old", "train gives up the bound"),
        ("algorithm.correction.level", CorrectionLevel.off, "rollout.mode", "Set algorithm.old_policy rollout, or"),
    ],
)
def test_what_an_asynchronous_run_gives_up_is_said(key, value, warned, said):
    made = change(recipe(RolloutMode.async_), key, value)
    [(found, message)] = mode_warnings(made)
    assert (found, said in message) == (warned, True)
    made.algorithm.old_policy, made.rollout.too_old = OldPolicy.rollout, TooOld.drop
    assert not list(mode_warnings(made))


def test_a_recipe_says_async_and_not_how_python_spells_it():
    loaded, _ = read_recipe(TOY, ["model.path=absent", "rollout.mode=async"], "train")
    assert loaded is not None
    assert loaded.recipe.rollout.mode is RolloutMode.async_
    _, problems = read_recipe(TOY, ["model.path=absent", "rollout.mode=async_"], "train")
    assert any("'async_' is not one of sync, one_step_off, async" in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("oversample", "staleness", "too_old", "fits"),
    [
        (2.0, 1, TooOld.wait, True),
        (2.1, 1, TooOld.wait, False),
        (1.5, 0, TooOld.wait, False),
        (1.5, 0, TooOld.drop, True),
    ],
)
def test_a_step_that_waits_for_all_groups_begins_no_more_than_the_next_updates_take(
    oversample, staleness, too_old, fits
):
    made = recipe(RolloutMode.sync)
    made.resync.pause = PauseMode.abort
    made.rollout.oversample, made.rollout.max_staleness, made.rollout.too_old = oversample, staleness, too_old
    found = [message for key, message in mode_violations(made) if key == "rollout.oversample"]
    assert [f"Use at most {staleness + 1}, or drop" in message for message in found] == ([] if fits else [True])


@pytest.mark.parametrize("setting", ["rollout.mode=async", "rollout.mode=one_step_off", "resync.flush_cache=false"])
def test_what_is_said_of_a_colocated_recipe_makes_it_one_that_is_accepted_without_a_warning(setting: str):
    given = [setting] if "mode" in setting else [setting, "rollout.mode=async", "resync.pause=abort"]
    refused = CliRunner().invoke(app, ["config", "check", str(COLOCATED), *given])
    assert refused.exit_code == 1
    (line,) = (line for line in refused.output.splitlines() if f"{setting.partition('=')[0]}: " in line)
    instead = re.findall(r"([a-z_]+\.[a-z_.]+) ([a-z0-9]+)", line.partition(", or ")[2])
    assert dict(instead)["resync.transport"] == "p2p"
    taken = CliRunner().invoke(
        app, ["config", "check", str(COLOCATED), *given, *(f"{key}={value}" for key, value in instead)]
    )
    assert taken.exit_code == 0
    assert [line for line in taken.output.splitlines() if "warning" in line and "no such file" not in line] == []
