"""The types of what a rollout gives (Segment, Trajectory), and the trajectory file format.

A trajectory file is JSONL, one object per trajectory, with the fields below as keys and arrays as lists.
`slimrl rollout --out FILE` writes it and `slimrl train --trajectories FILE` reads it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.base.jsonl import read_jsonl
from slimrl.data.trajectory_checks import check_fields, checked_array


class Status(str, Enum):
    """How a trajectory ended."""

    completed = "completed"
    truncated = "truncated"
    """The trajectory ran out of tokens or turns."""
    aborted = "aborted"
    """The trajectory was stopped at its deadline or by the engine."""
    failed = "failed"
    """An engine, a tool, the reward function or the teacher failed; never trained on."""


POSTED_REWARD = "posted_reward"
"""Key of `Trajectory.scratch`: the reward that an agent behind the gateway gave its trajectory"""

POSTED_BY_ROLE = "posted_by_role"
"""Key of `Trajectory.scratch`: the rewards that it gave its roles, numbers by role"""

PROMPT_ID = "prompt_id"
"""Key of `Trajectory.scratch`: the prompt's id of a role's part of an episode, whose group may be of the role"""

CACHE_HITS = "tool_cache_hit_fraction"
"""Key of `Trajectory.measured`: fraction of tool calls that were answered from the cache of pure tools, which all
episodes of a process share"""

STARTED_AT, ENDED_AT = "started_at", "ended_at"
"""Keys of `Trajectory.measured`: Unix times at which the trajectory got its slot in a rollout and was scored"""

STALE_CACHE_TOKENS = "num_stale_cache_tokens"
"""Key of `Trajectory.metadata`, if there are any: sampled tokens that attended to keys and values of older weights than
their own"""
DRAFT_TOKENS, ACCEPTED_DRAFT_TOKENS = "num_draft_tokens", "num_accepted_draft_tokens"
"""Keys of `Trajectory.metadata`, if there are any: tokens that speculative decoding proposed, and those among them that
the policy accepted"""
REPLAYED_TOKENS = "num_replayed_tokens"
"""Key of `Trajectory.metadata`, if there are any: sampled tokens that a resumed run had from its checkpoint"""
ENGINE_COUNTS = (STALE_CACHE_TOKENS, DRAFT_TOKENS, ACCEPTED_DRAFT_TOKENS, REPLAYED_TOKENS)
"""Names of the counts in an engine's answers"""


@dataclass(kw_only=True, eq=False)
class Segment:
    """One contiguous context: prompt, sampled tokens and tool results, T tokens in order."""

    tokens: np.ndarray
    """int32 [T], ids of the tokens"""
    loss_mask: np.ndarray
    """bool [T], true exactly on tokens that the policy sampled, or that supervised training learns"""
    rollout_logprobs: np.ndarray
    """float32 [T], the engine's natural-log probability; 0 where the policy did not sample"""
    weight_versions: np.ndarray
    """int32 [T], version that sampled the token; -1 where the policy did not sample"""
    turn_ids: np.ndarray
    """int16 [T], 0-based assistant turn of a token; a tool result has the turn that called it, the prompt -1"""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, topk]; -1 where the engine reports none"""
    teacher_logprobs: np.ndarray | None = None
    """float32 [T], the teacher's natural-log probability; 0 where the policy did not sample. None without a teacher"""
    role: str = ""
    """Whose conversation it is, in an episode of several roles (slimrl/agent/roles); empty in others"""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in _ARRAYS:
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"segment: {name} has {len(value)} entries, tokens has {length}")

    @classmethod
    def not_sampled(cls, tokens: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray) -> "Segment":
        """Text that no engine sampled, for supervised training: log-probs 0, versions and turns -1."""
        length = len(tokens)
        return cls(
            tokens=np.asarray(tokens, np.int32),
            loss_mask=np.asarray(loss_mask, np.bool_),
            rollout_logprobs=np.zeros(length, np.float32),
            weight_versions=np.full(length, -1, np.int32),
            turn_ids=np.full(length, -1, np.int16),
        )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, eq=False)
class Trajectory:
    """One rollout of a prompt: its conversation, its tokens and its reward."""

    group_id: str
    """The prompt's id; advantages are grouped by this and by nothing else."""
    trajectory_id: str
    segments: list[Segment]
    status: Status
    reward: float = float("nan")
    """Reward of the trajectory; NaN until it is scored."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Values of the reward's named parts, if it has any."""
    role_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of each role that is trained, in an episode of several; else empty"""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn, which `reward` does not include; empty if the task gives none."""
    turn_states: list[str] = field(default_factory=list)
    """State of the environment before each turn, equal texts for equal states; empty if unknown."""
    advantage: float | None = None
    """Advantage that the task gives, for `algorithm.advantage: given`; else None."""
    turn_advantages: list[float] = field(default_factory=list)
    """Advantage of each turn that the task gives, for `algorithm.advantage: given`; else empty."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as text, for rewards and readers; training uses the segments alone."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`num_turns`, `num_tool_calls`, `num_tool_errors`, `num_malformed_calls`, `tool_calls`, `num_cached_tokens`,
    `num_retries`, `num_prompt_messages`, `num_compactions`, `num_subagents`, `subagents`, those of ENGINE_COUNTS,
    `environment`, `gateway`, `roles`, `error`, `reward_timed_out` and the task's own keys."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Values that the environment left for the reward; not part of the file format."""
    measured: dict[str, float] = field(default_factory=dict)
    """Measurements that depend on the clock, and are not part of the file format, so that a deterministic run repeats
    its files: seconds of the environment (`start_s`, `step_s`, `close_s`), `tool_cache_hit_fraction`, `started_at` and
    `ended_at`."""
    images: dict[int, bytes] = field(default_factory=dict)
    """PNGs of the environment's states, by the number of the turn that follows; not part of the file format"""
    tools: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """JSON schemas of the tools that each role was shown at the start, without roles of the empty one; not part of the
    file format"""
    search_tree: "SearchTree | None" = None
    """What `agent.search` saw besides the path that it chose; not part of the file format"""

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    @property
    def num_turns(self) -> int:
        """Assistant turns; one that ended before its first token counts too, if the metadata says so."""
        last = max((int(segment.turn_ids.max(initial=-1)) for segment in self.segments), default=-1)
        return max(last + 1, int(self.metadata.get("num_turns", 0)))

    def check_turns(self) -> None:
        """Raises ValueError if a list with an entry for each turn has another length; names it."""
        for name in ("turn_rewards", "turn_states", "turn_advantages"):
            given = len(getattr(self, name))
            if given not in (0, self.num_turns):
                raise ValueError(f"{name} has {given} entries, and the trajectory {self.num_turns} turns")


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchTree:
    """All turns of a search over an episode's steps, N of them, each once among the tokens that are trained."""

    segments: list[Segment]
    """The contexts of all paths; `loss_mask` is true on a turn in the first of them that has it"""
    turn_advantages: list[float]
    """Value of the state after each turn less the mean of those that its siblings led to, by the turn's number"""


_ARRAYS = tuple(one.name for one in fields(Segment) if one.name != "role")
_OPTIONAL = ("routed_experts", "teacher_logprobs")
"""Arrays of a segment that may be null."""

_NOT_IN_FILES = ("scratch", "measured", "images", "tools", "search_tree")


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    segments = [
        {name: None if (value := getattr(segment, name)) is None else value.tolist() for name in _ARRAYS}
        | ({"role": segment.role} if segment.role else {})
        for segment in trajectory.segments
    ]
    values = {name: value for name, value in vars(trajectory).items() if name not in _NOT_IN_FILES}
    return {**values, "status": trajectory.status.value, "segments": segments}


def from_json(value: dict[str, Any]) -> Trajectory:
    """Raises ValueError for an object that is not a trajectory; says why."""
    known = {
        one.name: one.default is MISSING and one.default_factory is MISSING
        for one in fields(Trajectory)
        if one.name not in _NOT_IN_FILES
    }
    _check_keys(value, known)
    if value["status"] not in [status.value for status in Status]:
        raise ValueError(f"`status` is {value['status']!r}; known are {', '.join(Status)}")
    if not isinstance(value["segments"], list) or not all(isinstance(one, dict) for one in value["segments"]):
        raise ValueError("`segments` must be a list of objects")
    check_fields(value)
    segments = [_segment(segment, f"segments[{number}]") for number, segment in enumerate(value["segments"])]
    trajectory = Trajectory(**{**value, "status": Status(value["status"]), "segments": segments})
    trajectory.check_turns()
    return trajectory


def _segment(value: dict[str, Any], where: str) -> Segment:
    try:
        # Files of runs without a teacher may lack its log-probs, those of episodes with one role its name.
        _check_keys(value, {name: name != "teacher_logprobs" for name in _ARRAYS} | {"role": False})
        role = value.get("role", "")
        if not isinstance(role, str):
            raise ValueError("`role` must be a text")
        return Segment(**{name: _array(name, value.get(name)) for name in _ARRAYS}, role=role)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_keys(value: dict[str, Any], known: dict[str, bool]) -> None:
    """Raises ValueError for a missing or an unknown key."""
    if missing := [f"`{name}`" for name, needed in known.items() if needed and name not in value]:
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if unknown := [f"`{name}`" for name in value if name not in known]:
        raise ValueError(f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown")


def _array(name: str, value: Any) -> Any:
    return None if name in _OPTIONAL and value is None else checked_array(name, value)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a trajectory file, which replaces one that is there."""
    with path.open("w") as file:
        for trajectory in trajectories:
            file.write(json.dumps(to_json(trajectory)) + "\n")


def read_trajectories(path: Path, vocab_size: int | None = None) -> list[Trajectory]:
    """All trajectories of a file, in order.

    Args:
        vocab_size: of the model that is trained on them, below which all tokens are; None if it is not known.

    Raises:
        ValueError: the file is missing or empty, or lines are broken; names every broken line.
    """

    def parse(value: dict[str, Any], number: int) -> Trajectory:
        try:
            trajectory = from_json(value)
            for place, segment in enumerate(trajectory.segments):
                if vocab_size is not None and (largest := segment.tokens.max(initial=0)) >= vocab_size:
                    raise ValueError(
                        f"segments[{place}]: `tokens` has {largest}, and the model's vocabulary {vocab_size} tokens"
                    )
        except ValueError as error:
            raise ValueError(f"not a trajectory: {error}") from error
        return trajectory

    return read_jsonl(path, parse, finite=False)
