"""The stop rule: counting in a row, its report, and a run that it stops and that is resumed."""

import math

import pytest
from test_sft_step import run_of

from slimrl.base.errors import RunError
from slimrl.config.algorithm_rules import LIMITS, OF_SFT, stop_violations
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import StopConfig
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.checks.checkpoint_check import check_checkpoint
from slimrl.runtime.state import RunState
from slimrl.runtime.stop_rule import count_crossed, limits_of, stop_report


def counted(settings: StopConfig, steps: list[dict[str, float]]) -> dict[str, list[float]]:
    crossed: dict[str, list[float]] = {}
    for metrics in steps:
        crossed = count_crossed(crossed, metrics, limits_of(settings))
    return crossed


def step(norm: float = 1.0, **metrics: float) -> dict[str, float]:
    return {"policy/grad_norm": norm, **{f"policy/{name}": value for name, value in metrics.items()}}


@pytest.mark.parametrize(
    ("norms", "in_a_row"),
    [([3.0, 4.0], [3.0, 4.0]), ([3.0, 2.0], []), ([3.0, 1.0, 5.0], [5.0]), ([2.0], []), ([math.inf], [math.inf])],
)
def test_a_step_within_the_limit_begins_the_count_anew(norms, in_a_row):
    found = counted(StopConfig(grad_norm=2.0), [step(norm) for norm in norms])
    assert found == ({"stop.grad_norm": in_a_row} if in_a_row else {})


def test_a_value_that_is_no_number_is_beyond_every_limit():
    limits = StopConfig(grad_norm=2.0, entropy_min=0.1, entropy_max=0.9)
    assert set(counted(limits, [step(math.nan, entropy=math.nan)])) == {
        "stop.grad_norm", "stop.entropy_min", "stop.entropy_max"
    }  # fmt: skip


def test_each_limit_has_its_own_side_and_its_own_count():
    limits = StopConfig(entropy_min=0.1, entropy_max=0.9)
    assert counted(limits, [step(entropy=0.05), step(entropy=0.05), step(entropy=1.0)]) == {"stop.entropy_max": [1.0]}


def test_a_step_without_an_update_counts_neither_way():
    limits = StopConfig(grad_norm=2.0)
    assert counted(limits, [step(3.0), {"rollout/tokens": 5.0}, step(4.0)]) == {"stop.grad_norm": [3.0, 4.0]}


def test_a_limit_of_a_metric_that_is_not_recorded_is_named():
    with pytest.raises(ValueError, match=r"stop\.kl: this run does not record policy/kl\. Set it to null\."):
        counted(StopConfig(kl=0.1), [{"rollout/tokens": 5.0}, step()])


def test_the_report_has_the_last_values_and_what_the_run_knows_of_differences():
    recipe = Recipe(stop=StopConfig(patience_steps=2, mismatch=0.01))
    recipe.rollout.sampling.temperature, recipe.rollout.max_trajectory_tokens = 0.7, 99
    metrics = {
        **step(), "mismatch/logprob_abs_mean": 0.03, "mismatch/routing_flips": 17.0, "resync/version": 5.0,
        "resync/fingerprint_mismatches": 0.0, "rollout/tokens": 123.0,
    }  # fmt: skip
    crossed = {"stop.mismatch": [0.02, 0.03]}
    report = stop_report(crossed, metrics, 7, recipe)
    assert report is not None
    assert report.splitlines() == [
        "step 7: mismatch/logprob_abs_mean above stop.mismatch 0.01 in 2 steps in a row: 0.02, 0.03",
        "  engines: mismatch/logprob_abs_mean 0.03",
        "  routing: mismatch/routing_flips 17",
        "  weights: resync/version 5, resync/fingerprint_mismatches 0",
        "  tokens: rollout/tokens 123",
        "  policy: policy/grad_norm 1",
        "  sampling: temperature 0.7, top_p 1.0, top_k -1, max_new_tokens 1024, max_trajectory_tokens 99",
    ]
    assert stop_report({"stop.mismatch": [0.03]}, metrics, 7, recipe) is None


def test_a_stopped_run_keeps_its_step_and_a_resumed_one_counts_on(tmp_path):
    """Gradients have a norm of 1 here. The run is first interrupted after one step beyond the limit."""
    recipe = Recipe(steps=5, stop=StopConfig(patience_steps=3, grad_norm=0.5))
    recipe.sft.summary_every_steps = 1
    run_of(tmp_path, recipe, RunState(), asked=1)
    checkpoints = RunFolder(tmp_path).checkpoints
    state = check_checkpoint(checkpoints / "step_000001", contents=True).state
    assert state.crossed == {"stop.grad_norm": [1.0]}
    with pytest.raises(
        RunError, match=r"step 3: policy/grad_norm above stop.grad_norm 0.5 in 3 steps in a row: 1, 1, 1"
    ):
        run_of(tmp_path, recipe, state)
    stopped = check_checkpoint(checkpoints / "step_000003", contents=True).state
    assert (stopped.step, stopped.crossed) == (3, {"stop.grad_norm": [1.0, 1.0, 1.0]})
    assert [line["step"] for line in read_metrics(RunFolder(tmp_path).metrics)] == [1, 2, 3]
    recipe.stop.grad_norm = 2.0
    _, trainers, _ = run_of(tmp_path, recipe, stopped)
    assert trainers.saved == [".partial_step_000005", "export"]
    assert stopped.crossed == {}


@pytest.mark.parametrize(
    ("command", "stop", "key", "message"),
    [
        ("sft", {"kl": 0.1}, "kl", "supervised training does not record this metric. Use null."),
        ("train", {"mismatch": 0.05}, "mismatch",
         "0.05 is not below algorithm.max_logprob_mismatch 0.05, above which the run stops at once."),
        ("train", {"entropy_min": 0.5, "entropy_max": 0.5}, "entropy_min", "0.5 is not below stop.entropy_max 0.5."),
    ],
)  # fmt: skip
def test_limits_without_effect_or_sense_are_refused(command, stop, key, message):
    recipe = Recipe(stop=StopConfig(**stop))
    recipe.algorithm.max_logprob_mismatch = 0.05
    assert list(stop_violations(recipe, command)) == [(f"stop.{key}", message)]


def test_every_limit_has_a_metric():
    everything = StopConfig(**{name: float(number + 1) for number, name in enumerate(LIMITS)})
    assert [limit.key for limit in limits_of(everything)] == [f"stop.{name}" for name in LIMITS]
    assert [limit.key for limit in limits_of(StopConfig(grad_norm=1.0))] == [f"stop.{name}" for name in OF_SFT]
