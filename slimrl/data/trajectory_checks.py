"""Types and ranges of what a trajectory file holds, by field. Each check raises ValueError and says what is wrong."""

import math
from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

INTEGERS: Mapping[str, tuple[type, int]] = {
    "tokens": (np.int32, 0),
    "weight_versions": (np.int32, -1),
    "turn_ids": (np.int16, -1),
    "routed_experts": (np.int16, -1),
}
"""Field of a segment -> its type and smallest value"""
NUMBERS = ("rollout_logprobs", "teacher_logprobs")
_COUNTS = (
    "num_turns", "num_tool_calls", "num_tool_errors", "num_malformed_calls", "num_cached_tokens", "num_retries",
    "num_prompt_messages", "num_compactions", "num_subagents", "num_stale_cache_tokens", "num_draft_tokens",
    "num_accepted_draft_tokens", "num_replayed_tokens",
)  # fmt: skip


def checked_array(name: str, value: Any) -> np.ndarray:
    """A segment's field as an array.

    Args:
        name: `loss_mask`, or one of INTEGERS or NUMBERS.
        value: of JSON.
    """
    flat, shape = _flat(name, value, 3 if name == "routed_experts" else 1)
    # The set of types takes less time than the conversion, which would take texts, booleans and fractions silently.
    kinds = set(map(type, flat))
    if name == "loss_mask":
        _require(kinds <= {bool}, name, "must hold true and false alone")
        return np.frombuffer(bytearray(flat), np.bool_)
    if name in NUMBERS:
        _require(kinds <= {int, float}, name, "must hold numbers alone")
        with np.errstate(over="ignore"):
            values = _converted(name, flat, "d").astype(np.float32)
        _require(bool(np.isfinite(values).all()), name, "must hold finite numbers of 32 bits")
        return values
    _require(kinds <= {int}, name, "must hold integers alone")
    dtype, least = INTEGERS[name]
    integers, most = _converted(name, flat, "q"), int(np.iinfo(dtype).max)
    in_range = integers.min(initial=least) >= least and integers.max(initial=most) <= most
    _require(bool(in_range), name, f"must hold integers from {least} to {most}")
    return integers.astype(dtype).reshape(shape)


def _converted(name: str, flat: list[Any], code: str) -> np.ndarray:
    """A list as an array, in a tenth of the time that numpy takes."""
    try:
        return np.frombuffer(array(code, flat), code)
    except OverflowError as error:
        raise ValueError(f"`{name}` has a number beyond 64 bits") from error


def _flat(name: str, value: Any, dimensions: int) -> tuple[list[Any], tuple[int, ...]]:
    """The entries of lists in lists, and their shape."""
    _require(isinstance(value, list), name, "is not a list")
    shape = [len(value)]
    for _ in range(dimensions - 1):
        lengths = set(map(len, value)) if all(type(one) is list for one in value) else set()
        _require(len(lengths) == 1 or not value, name, "must be a list of lists of lists, of the same lengths")
        shape += lengths or {0}
        value = list(chain.from_iterable(value))
    return value, tuple(shape)


def check_fields(value: Mapping[str, Any]) -> None:
    """Check a trajectory's own fields; those that are missing are not checked."""
    for name in ("group_id", "trajectory_id"):
        _require(isinstance(value[name], str), name, "must be a text")
    reward = value.get("reward", math.nan)
    _require(_is_number(reward) and not math.isinf(_as_float(reward)), "reward", "must be a finite number, or NaN")
    rewards = value.get("rewards", {})
    _require(isinstance(rewards, dict) and _are_finite(rewards.values()), "rewards", "must be an object of numbers")
    by_role = value.get("role_rewards", {})
    _require(
        isinstance(by_role, dict) and _are_finite(by_role.values()), "role_rewards", "must be an object of numbers"
    )
    for name in ("turn_rewards", "turn_advantages"):
        given = value.get(name, [])
        _require(isinstance(given, list) and _are_finite(given), name, "must be a list of numbers")
    states = value.get("turn_states", [])
    _require(
        isinstance(states, list) and all(isinstance(one, str) for one in states), "turn_states",
        "must be a list of texts",
    )  # fmt: skip
    advantage = value.get("advantage")
    _require(advantage is None or _are_finite([advantage]), "advantage", "must be a number or null")
    messages = value.get("messages", [])
    _require(
        isinstance(messages, list) and all(isinstance(one, dict) for one in messages), "messages",
        "must be a list of objects",
    )  # fmt: skip
    _check_metadata(value.get("metadata", {}))
    for role, facts in value.get("metadata", {}).get("roles", {}).items():
        trained = facts.get("train") if isinstance(facts, dict) else None
        _require(
            isinstance(trained, bool), f"metadata.roles.{role}", "must be an object whose `train` is true or false"
        )
        group = facts.get("group", "")
        _require(isinstance(group, str), f"metadata.roles.{role}", "must have a text as its `group`")
        paid = not trained or role in by_role or value["status"] == "failed"
        _require(paid, "role_rewards", f"must have {role}, which metadata.roles says is trained")


def _check_metadata(metadata: Any) -> None:
    _require(isinstance(metadata, dict), "metadata", "must be an object")
    for name in _COUNTS:
        count = metadata.get(name, 0)
        _require(type(count) is int and 0 <= count < 2**63, f"metadata.{name}", "must be an integer from 0")
    for name in ("tool_calls", "environment", "gateway", "roles"):
        _require(isinstance(metadata.get(name, {}), dict), f"metadata.{name}", "must be an object")
    for tool, counts in metadata.get("tool_calls", {}).items():
        counted = isinstance(counts, dict) and all(type(one) is int for one in counts.values())
        _require(counted, f"metadata.tool_calls.{tool}", "must be an object of integers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _are_finite(values: Any) -> bool:
    return all(_is_number(one) and math.isfinite(_as_float(one)) for one in values)


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` {problem}")
