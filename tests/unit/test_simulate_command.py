"""`slimrl simulate`: its options and refusals, replays of recorded runs, and how GPUs are split."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_simulator import GROUPS, recorded_run
from typer.testing import CliRunner

from slimrl import cli
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode, TooOld
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.simulator import command
from slimrl.estimates.simulator.command import Question
from slimrl.estimates.simulator.schedule import ONE_STEP_OFF, SYNC, asynchronous, schedule_of
from slimrl.estimates.simulator.splits import best_splits, legal_splits, scaled_split

RECIPES = Path(__file__).parents[2] / "recipes"
CALCULATOR = str(RECIPES / "tiny_moe/gspo_calculator.yaml")
COLOCATED = str(RECIPES / "qwen3/qwen3_8b_gspo.yaml")
SPLIT = str(RECIPES / "qwen3/qwen3_8b_gspo_disaggregated.yaml")
SMALL = ("rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", "trainer.updates_per_rollout=1")


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments)])


def test_every_option_is_of_the_hardware_or_of_the_question(monkeypatch):
    calls = []
    monkeypatch.setattr(command, "run", lambda *arguments, **settings: calls.append((arguments, settings)))
    links = {name: float(n) for n, name in enumerate(("memory_gb_per_s", "nvlink_gb_per_s", "network_gb_per_s"), 101)}
    hardware = {"gpus_per_node": 4, "gpu_memory_gib": 81.0, "peak_tflops": 300.0, "mfu": 0.5}
    asked = {"tool": "pareto:1:2", "turn_tokens": "7", "turns": "2", "prompt_tokens": 9, "decode_efficiency": 0.5}
    asked |= {"gpus": "8,16", "steps": 5, "seed": 3}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**links, **hardware, **asked}.items()]
    assert invoke("r.yaml", "a=1", *options, "--scale-batch", "--json-file", "x.json").exit_code == 0
    assert invoke("r.yaml", "--suggest", 64).exit_code == 0
    assert invoke("r.yaml", "--trace", "runs/x").exit_code == 0
    (first, json_file), (second, _), (third, _) = calls
    assert first == (
        Path("r.yaml"), ["a=1"], Hardware(**hardware, links=Machine(**links)), Question(**asked, scale_batch=True)
    )  # fmt: skip
    assert json_file == {"json_file": Path("x.json")}
    assert second == (Path("r.yaml"), [], Hardware(), Question(suggest=64))
    assert third[-1] == Question(trace=Path("runs/x"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CALCULATOR, "--steps", 0), "--steps 0: must be at least 1"),
        ((CALCULATOR, "--seed", -1), "--seed -1: must be at least 0"),
        ((SPLIT, "--turns", 0), "--turns 0: must be a number, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA; a number"),
        ((SPLIT, "--turn-tokens", "lognormal:0.5:1"), "lognormal:0.5:1: must be a number, lognormal:MEDIAN:SIGMA or"),
        ((SPLIT, "--turn-tokens", "pareto:0:1"), "a number, MEDIAN or LEAST is at least 1"),
        ((CALCULATOR, "--decode-efficiency", 0), "--decode-efficiency 0.0: must be above 0"),
        ((CALCULATOR, "--scale-batch"), "--scale-batch goes with --gpus"),
        ((CALCULATOR, "--gpus", "8", "--suggest", 8), "--gpus and --suggest exclude each other"),
        ((CALCULATOR, "--trace", "x", "--tool", "1"), "--tool cannot go with --trace"),
        ((CALCULATOR, "--trace", "x", "--gpus", "8", "--turns", "1"), "--turns and --gpus cannot go with --trace"),
        ((CALCULATOR, "--trace", "absent"), "--trace absent: there is no metrics.jsonl"),
        ((SPLIT, "--gpus", "8,x"), "--gpus 8,x: must be numbers of GPUs with commas between them"),
        ((SPLIT, "--gpus", "0"), "--gpus 0: must be numbers of GPUs"),
        ((SPLIT, "--gpus", "6"), "the recipe's 8 trainer ranks and 4 engines of 2 GPUs scale to multiples of 4"),
        ((SPLIT, "--suggest", 2), "--suggest 2: no split into engines of 2 GPUs and trainer ranks in replicas of 2"),
        ((SPLIT, "--tool", "slow"), "--tool slow: must be a number"),
        ((SPLIT, "--turn-tokens", "gamma:1:2"), "--turn-tokens gamma:1:2: must be a number"),
        ((SPLIT, "--prompt-tokens", 99_999), "--prompt-tokens 99999: must be at least 0 and below"),
        ((SPLIT, "rollout.nmu_engines=3"), "rollout.nmu_engines: no such key"),
        ((COLOCATED,), "rollout.colocated lets the engines share the trainer's GPUs, and only sync works so"),
        ((SPLIT, "resync.transport=ipc"), "resync.transport ipc puts the engines on the trainer's GPUs"),
        ((SPLIT, "resync.transport=ipc"), "To compare modes, give resync.transport=p2p; the row"),
        ((str(RECIPES / "tiny_moe/sft.yaml"),), "a recipe for slimrl sft, which has no rollout to simulate"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_one_message(arguments, message):
    result = invoke(*arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert "Traceback" not in result.output


def test_a_recorded_run_is_compared_in_all_modes(tmp_path):
    run = recorded_run(tmp_path / "run", GROUPS)
    result = invoke(CALCULATOR, *SMALL, "--trace", run, "--steps", 4, "--json-file", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "2 groups of" in result.output
    assert "1 dropped groups are left out" in result.output.replace("\n", " ")
    assert "so their rows are a rough guide" in result.output.replace("\n", " ")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["mode"], row["max_staleness"]) for row in rows] == [
        ("sync", 0), ("one_step_off", 1), ("async", 1), ("async", 2), ("async", 4), ("async", 8)
    ]  # fmt: skip
    sync = rows[0]
    assert sync["seconds"] == pytest.approx(4 * (2 + 10 + 5.5)), "a filtered group, another, training, resync"
    assert sync["trainer_idle"] == pytest.approx(12 / 17.5)
    assert sync["staleness"]["histogram"] == {"0": 4}
    assert sync["trajectory_s"] == {"p50": pytest.approx(3), "p99": pytest.approx(10), "max": pytest.approx(10)}
    assert all(row["steps_per_hour"] >= sync["steps_per_hour"] for row in rows)
    assert [row["of_the_run"] for row in rows] == [True, *[False] * 5]
    table = [line.split() for line in result.output.splitlines() if line.strip().startswith("2 for both")]
    assert [line[3] for line in table] == ["sync,", "one_step_off", "async", "async", "async", "async"]
    assert table[0][4:7] == ["the", "run's", f"{3600 / 17.5:.1f}"]
    assert "oversample" not in result.output


BESIDE = (*SMALL, "deterministic=false", "rollout.mode=async", "algorithm.correction.level=token")


@pytest.mark.parametrize(
    ("staleness", "others"), [(0, [0, 1, 1, 2, 4, 8]), (2, [0, 1, 1, 4, 8]), (3, [0, 1, 1, 2, 4, 8])]
)
def test_the_row_of_a_recorded_run_is_marked_and_added_where_it_is_missing(tmp_path, staleness, others):
    run = recorded_run(tmp_path / "run", GROUPS)
    options = ("--trace", run, "--steps", 4, "--json-file", tmp_path / "out.json")
    result = invoke(CALCULATOR, *BESIDE, f"rollout.max_staleness={staleness}", *options)
    assert result.exit_code == 0, result.output
    assert f"async {staleness}, the run's" in result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["max_staleness"] for row in rows] == sorted(row["max_staleness"] for row in rows)
    assert [(row["mode"], row["max_staleness"]) for row in rows if row["of_the_run"]] == [("async", staleness)]
    assert [row["max_staleness"] for row in rows if not row["of_the_run"]] == others


def test_of_a_run_with_partial_rollouts_no_row_is_its_own_and_its_times_are_said_to_have_pauses(tmp_path):
    run = recorded_run(tmp_path / "run", GROUPS)
    partial = (*SMALL, "deterministic=false", "rollout.oversample=2", "resync.pause=abort")
    result = invoke(CALCULATOR, *partial, "--trace", run, "--steps", 4)
    assert result.exit_code == 0, result.output
    assert "after a step have its training and resync in them, and no row is the run's" in result.output
    assert ", the run's" not in result.output


def test_a_recorded_run_with_engines_of_their_own_has_their_gpus_in_the_table(tmp_path):
    run = recorded_run(tmp_path / "run", GROUPS)
    result = invoke(CALCULATOR, *SMALL, "resync.transport=p2p", "--trace", run, "--steps", 4)
    assert "2 + 2  sync, the run's" in result.output


def test_partial_rollouts_are_noted_as_not_modelled():
    options = (SPLIT, "--turn-tokens", 100, "--tool", 0, "--steps", 1)
    assert "oversample" not in invoke(*options).output
    result = invoke(*options, "rollout.oversample=2", "resync.pause=abort")
    assert result.exit_code == 0, result.output
    assert "note: rollout.oversample 2 (partial rollouts) is not modelled: in `sync` a step waits" in result.output


def recipe(**parallel) -> Recipe:
    plain = Recipe()
    trainer = replace(plain.trainer, num_ranks=8, parallel=ParallelConfig(**parallel))
    rollout = replace(plain.rollout, num_engines=4, engine_tp=2, prompts_per_step=32)
    return replace(plain, trainer=trainer, rollout=rollout)


def test_a_split_is_scaled_with_its_batch_if_that_is_asked_for():
    plain = ["trainer.num_ranks=32", "rollout.num_engines=16"]
    assert scaled_split(recipe(), 64, scale_batch=False) == plain
    assert scaled_split(recipe(), 64, scale_batch=True) == [*plain, "rollout.prompts_per_step=128"]
    assert scaled_split(recipe(), 4, scale_batch=False) == ["trainer.num_ranks=2", "rollout.num_engines=1"]


def test_splits_use_all_gpus_in_whole_replicas_and_engines():
    assert legal_splits(recipe(tensor=2, pipeline=2), 16) == [(12, 2), (8, 4), (4, 6)]
    assert legal_splits(recipe(expert=8), 20) == [(16, 2), (8, 6)]
    with pytest.raises(ValueError, match="--suggest 8: no split into engines of 2 GPUs and trainer ranks in replicas"):
        legal_splits(recipe(expert=8), 8)


@pytest.mark.parametrize("best", [1, 37, 150, 299])
def test_a_search_finds_the_best_of_many_splits_with_few_trials(best):
    tried = []

    def measure(ranks: int, engines: int) -> float:
        tried.append(engines)
        if engines % 10 == 3:
            raise RecipeError([Problem(key="x", message="refused")])
        return min(engines / best, (300 - engines) / (300 - best))

    splits = [(300 - engines, engines) for engines in range(1, 300)]
    found = best_splits(splits, measure, lambda rate: (True, rate))
    assert found[0] == pytest.approx(1.0)
    assert found == sorted(found, reverse=True)
    assert len(tried) == len(set(tried)) < 40


def test_a_search_of_refused_splits_says_why():
    def measure(ranks: int, engines: int) -> float:
        raise RecipeError([Problem(key="trainer.num_ranks", message="refused")])

    with pytest.raises(RecipeError, match="refused"):
        best_splits([(1, 1), (2, 2)], measure, lambda rate: (True, rate))


def test_a_split_that_does_not_fit_is_marked_in_the_table(tmp_path):
    options = ("--gpu-memory-gib", 45, "--turn-tokens", 500, "--steps", 1, "--json-file", tmp_path / "out.json")
    result = invoke(SPLIT, "--suggest", 16, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    fits = {f"{row['trainer_ranks']} + {16 - row['trainer_ranks']}": not row["problems"] for row in rows}
    assert set(fits.values()) == {True, False}
    table = [line for line in result.output.splitlines() if " + " in line and "note" not in line]
    assert {line[: line.index(" sync")].strip(): "sync, does not fit" not in line for line in table} == fits


def test_a_split_that_does_not_fit_is_worse_than_a_slow_one():
    splits = [(30 - engines, engines) for engines in range(1, 30)]
    found = best_splits(splits, lambda ranks, engines: engines, lambda rate: (rate <= 20, float(rate)))
    assert found[0] == 20
    assert found[-1] > 20


def test_the_recipes_own_mode_is_simulated():
    rollout = recipe().rollout
    assert schedule_of(rollout) == SYNC
    assert schedule_of(replace(rollout, mode=RolloutMode.one_step_off)) == ONE_STEP_OFF
    staleness = replace(rollout, mode=RolloutMode.async_, max_staleness=3, too_old=TooOld.wait)
    assert schedule_of(staleness) == asynchronous(3, TooOld.wait)
