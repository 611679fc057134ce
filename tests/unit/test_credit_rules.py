"""Rules of credit over turns, selection and refill: each refuses what contradicts and says what to do."""

import pytest

from slimrl.config.algorithm_rules import credit_violations
from slimrl.config.schema.credit import CreditName, RefillMode, SelectionMode
from slimrl.config.schema.recipe import Recipe


def recipe(**changes) -> Recipe:
    """With `section__name=value` under `algorithm`."""
    made = Recipe()
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = made.algorithm
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"credit__process_weights": [0.7, 0.3]}, "credit.process_weights", "has 2 weights for 1 stages"),
        (
            {
                "credit__stage_starts": [5, 5],
                "credit__process_weights": [1, 1, 1],
                "credit__outcome_weights": [1, 1, 1],
            },
            "credit.stage_starts",
            "must be steps above 1 in rising order",
        ),
        (
            {"credit__stage_starts": [1], "credit__process_weights": [1, 1], "credit__outcome_weights": [1, 1]},
            "credit.stage_starts",
            "must be steps above 1 in rising order",
        ),
        (
            {"credit__name": CreditName.gigpo, "advantage": "given"},
            "credit.name",
            "gigpo compares turns with algorithm.advantage grpo, dr_grpo, rloo, not with given",
        ),
        (
            {"selection__mode": SelectionMode.best_and_worst, "selection__count": 4},
            "selection.count",
            "leave out none of rollout.samples_per_prompt 8",
        ),
        ({"selection__mode": SelectionMode.best, "selection__count": 9}, "selection.count", "9 is more than"),
        (
            {"selection__mode": SelectionMode.best, "credit__turn_weights": [1.0]},
            "selection.mode",
            "every trajectory advantage 1",
        ),
        (
            {"dynamic_sampling__refill": RefillMode.order, "skip_zero_variance": False},
            "dynamic_sampling.refill",
            "which algorithm.skip_zero_variance false keeps",
        ),
        (
            {"overlong__max_tokens": 100},
            "overlong.buffer_tokens",
            "1024 is more than algorithm.overlong.max_tokens 100",
        ),
    ],
)
def test_what_contradicts_is_refused_at_its_key(changes, key, message):
    ((found, said),) = credit_violations(recipe(**changes))
    assert found == f"algorithm.{key}"
    assert message in said


def test_draws_by_value_do_not_follow_the_weights_of_files():
    made = recipe(dynamic_sampling__refill=RefillMode.value)
    assert list(credit_violations(made)) == []
    made.data.weights = {"train": 1.0, "other": 2.0}
    assert [key for key, _ in credit_violations(made)] == ["algorithm.dynamic_sampling.refill"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"credit__name": CreditName.turn, "advantage": "given"},
        {"credit__name": CreditName.gigpo},
        {"selection__mode": SelectionMode.best_and_worst, "selection__count": 3},
        {"overlong__max_tokens": 2048},
        {
            "credit__stage_starts": [34, 67],
            "credit__process_weights": [0.7, 0.3, 0.0],
            "credit__outcome_weights": [0.3, 0.7, 1.0],
        },
    ],
)
def test_what_fits_is_not_refused(changes):
    assert list(credit_violations(recipe(**changes))) == []


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [("trajectory", [], False), ("trajectory", [1.0], True), ("turn", [], True), ("gigpo", [], True)],
)
def test_the_settings_say_whether_advantages_are_by_turn(name, weights, expected):
    assert recipe(credit__name=CreditName(name), credit__turn_weights=weights).algorithm.credit.by_turn == expected
