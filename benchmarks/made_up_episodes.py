"""Episodes that were played before: random trajectories of several turns, as episode workers send them."""

import pickle
from typing import Any

import numpy as np
from made_up_engine import LABEL, QUESTION

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory

SAMPLES = 8
"""Trajectories of a prompt"""
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 90, 0.8, 2048
"""Sampled tokens of a turn: median, deviation of the logarithm; and most of a trajectory"""
MOST_TURNS = 6


class MadeUpEpisodes:
    """In place of EpisodeWorkers: trajectories that were pickled before."""

    def __init__(self, trajectories: int) -> None:
        rng = np.random.default_rng(0)
        made = [trajectory_of(number, rng) for number in range(trajectories)]
        self._made = [pickle.dumps(trajectory) for trajectory in made]
        self.totals = {
            "tokens": sum(len(segment) for trajectory in made for segment in trajectory.segments),
            "sampled_tokens": sum(int(s.loss_mask.sum()) for trajectory in made for s in trajectory.segments),
            "trajectory_bytes": sum(map(len, self._made)),
        }
        """Sums over all trajectories; the bytes are those of the pickled ones"""

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def take_lags(self) -> tuple[float, ...]:
        return (0.0,)

    async def run(self, prompt: Prompt, *, trajectory_id: str, **_: Any) -> Trajectory:
        number = int(prompt.prompt_id) * SAMPLES + int(trajectory_id.rsplit("/", 1)[1])
        trajectory = pickle.loads(self._made[number])
        trajectory.trajectory_id = trajectory_id
        return trajectory


def trajectory_of(number: int, rng: np.random.Generator) -> Trajectory:
    """A trajectory: a prompt, then by turns what the policy sampled and a tool's result; right or wrong."""
    num_turns = int(rng.integers(1, MOST_TURNS + 1))
    drawn = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, num_turns).astype(int)
    sampled = np.clip(drawn, 1, MOST_TOKENS // num_turns)
    lengths, turns, masks = [40], [-1], [False]
    for turn, length in enumerate(sampled):
        lengths += [int(length), 12]
        turns += [turn, turn]
        masks += [True, False]
    mask = np.repeat(masks, lengths)
    segment = Segment(
        tokens=rng.integers(0, 150_000, len(mask)).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(0.5, len(mask)), 0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.repeat(turns, lengths).astype(np.int16),
    )
    answer = LABEL if rng.random() < 0.5 else LABEL + 1
    talk = [
        {"role": role, "content": "so much text " * int(length // 3)}
        for length in sampled
        for role in ("assistant", "tool")
    ]
    messages = [{"role": "user", "content": QUESTION}, *talk, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]
    counts = ("num_tool_errors", "num_malformed_calls", "num_cached_tokens", "num_retries")
    return Trajectory(
        group_id=str(number // SAMPLES),
        trajectory_id="",
        segments=[segment],
        status=Status.completed,
        messages=messages,
        metadata={
            "num_turns": num_turns,
            "num_tool_calls": num_turns - 1,
            "num_prompt_messages": 1,
            "environment": {"start_retries": 0, "metrics": {}},
            **dict.fromkeys(counts, 0),
        },
        measured={"start_s": 0.1, "step_s": 0.2, "close_s": 0.1},
    )
