"""Tokens over keys and values of older weights, as a session's client works it out, against a cache played by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest
from scripted_episode import ScriptedEngine, call_text, runner_of

from slimrl.agent.calculator import calculator
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.engines.kept_caches import SessionCache
from slimrl.rollout.statistics import rollout_metrics


def versions(*counts: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(np.full(count, version, np.int32) for version, count in counts)])


def test_a_turn_after_a_resync_is_stale_where_it_finds_what_older_weights_computed():
    for cached, stale in ((0, 0), (5, 10), (30, 10)):
        cache = SessionCache()
        assert cache.add(20, 4, versions((1, 10))) == 0
        assert cache.add(35, cached, versions((2, 10))) == stale
        # By now the new weights have computed all behind it.
        assert cache.add(50, min(cached, 3), versions((2, 5))) == (5 if cached else 0)


def test_tokens_of_a_turn_that_goes_on_in_place_are_stale_from_the_change_on():
    cache = SessionCache()
    assert cache.add(20, 0, versions((1, 4), (2, 3), (3, 2))) == 5
    assert cache.add(40, 29, versions((3, 6))) == 6
    assert cache.add(60, 0, versions((3, 6))) == 0
    assert cache.add(80, 60, versions((3, 6))) == 0


def test_an_answer_without_tokens_says_nothing():
    cache = SessionCache()
    cache.add(20, 0, versions((1, 4)))
    assert cache.add(24, 0, versions()) == 0
    assert cache.add(24, 24, versions((2, 4))) == 4


@pytest.mark.parametrize("seed", range(20))
def test_random_sessions_agree_with_a_cache_of_positions(seed):
    rng = random.Random(seed)
    cache, kept, version, length = SessionCache(), [], 1, 10
    for _ in range(30):
        version += rng.random() < 0.3
        cached = rng.choice([0, len(kept), rng.randint(0, length)])
        kept = kept[:cached]
        # What the session has not computed itself counts as computed now.
        kept += [version] * (length - len(kept))
        stale, sampled = 0, []
        for _ in range(rng.randint(1, 8)):
            stale += min(kept) < version
            sampled.append(version)
            kept.append(version)
            version += rng.random() < 0.1
        assert cache.add(length, cached, np.array(sampled, np.int32)) == stale
        length = len(kept) + rng.randint(0, 5)


class StaleEngine(ScriptedEngine):
    """Says of each answer that two of its tokens are stale."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return replace(await super().generate(request), counts={"num_stale_cache_tokens": 2, "num_draft_tokens": 0})


async def test_a_trajectory_counts_the_stale_tokens_of_its_turns_and_a_step_those_of_its_trajectories():
    call = call_text("calculator", expression="1+1")
    runner = replace(runner_of(tools=ToolBox([make_tool(calculator)])), engine=StaleEngine(call, call, "2<|im_end|>"))
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": "1+1?"}], label=2)
    trajectory = await runner.run(prompt, trajectory_id="t", sampling=SamplingConfig(), seed=0)
    assert "num_draft_tokens" not in trajectory.metadata
    assert trajectory.metadata["num_stale_cache_tokens"] == 2 * trajectory.num_turns == 6
    trajectory.reward = 1.0
    assert rollout_metrics([trajectory, trajectory], 1.0)["rollout/stale_cache_tokens"] == 12
