"""Compaction: when a summary is asked for, what the policy sees afterwards, and which tokens are trained as what."""

import asyncio

import numpy as np
import pytest
from test_episode import CALL, CHAT, PROMPT, ScriptedEngine, encode, expert_rows, runner_of

from slimrl.config.schema.agent import AgentConfig, CompactionConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status
from slimrl.rollout.statistics import rollout_metrics

SUMMARY, ANSWER = "So far 580.<|im_end|>", "It is 580.<|im_end|>"
PLAIN_CALL = CALL.replace("34*17+2", "1+1")


def play(engine, *, rule=None, keep_turns=0, at_tokens=170, seed=11, **limits):
    compaction = CompactionConfig(at_tokens=at_tokens, keep_turns=keep_turns, prompt="Summarize.")
    agent = AgentConfig(compaction=compaction)
    runner = runner_of(engine, agent=agent, summary_rule=rule, **{"max_turns": 9, **limits})
    sampling = SamplingConfig(max_new_tokens=64)
    return asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=sampling, seed=seed))


def texts(engine):
    return [CHAT.template.decode(request.input_ids) for request in engine.requests]


def test_the_policy_writes_a_summary_that_takes_the_place_of_its_turns():
    engine = ScriptedEngine(CALL, PLAIN_CALL, SUMMARY, ANSWER, experts=True)
    trajectory = play(engine)
    assert trajectory.status is Status.completed
    first, second = trajectory.segments
    start, more, asked, after = texts(engine)
    assert asked.startswith(more)
    assert asked.count("tool_response>") == 4, "the summary is of the newest answer too"
    assert asked.endswith("<|im_start|>user\nSummarize.<|im_end|>\n<|im_start|>assistant\n")
    told = "Compute 34*17+2."
    assert after == start.replace(told, f"{told}\n\nSo far 580.")
    # Both segments are what the engine saw and sampled, and the summary's tokens are of the turn that follows it.
    assert first.tokens.tolist() == engine.requests[2].input_ids + encode(SUMMARY)
    assert second.tokens.tolist() == engine.requests[3].input_ids + encode(ANSWER)
    turns = [segment.turn_ids[segment.loss_mask].tolist() for segment in (first, second)]
    lengths = [len(encode(text)) for text in (CALL, PLAIN_CALL, SUMMARY, ANSWER)]
    assert turns == [[0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2], [2] * lengths[3]]
    assert trajectory.num_turns == trajectory.metadata["num_turns"] == 3
    assert [message["role"] for message in trajectory.messages] == ["user"] + ["assistant", "tool"] * 2 + ["assistant"]
    # Each segment has the rows of experts of its own passes.
    rows = len(second.tokens) - 1
    np.testing.assert_array_equal(second.routed_experts[:rows], expert_rows(rows, 4))
    assert first.routed_experts.shape[0] == len(first.tokens)
    assert trajectory.metadata["num_compactions"] == 1
    assert rollout_metrics([trajectory], 1.0)["rollout/compactions_mean"] == 1
    assert "rollout/stale_cache_tokens" not in rollout_metrics([trajectory], 1.0)


@pytest.mark.parametrize(
    ("at_tokens", "script"),
    [(150, [CALL, PLAIN_CALL, SUMMARY, CALL, SUMMARY, ANSWER]), (170, [CALL, PLAIN_CALL, SUMMARY, CALL, ANSWER])],
)
def test_each_request_has_a_seed_of_its_own(at_tokens, script):
    engine, again = ScriptedEngine(*script), ScriptedEngine(*script)
    trajectory = play(engine, at_tokens=at_tokens)
    assert trajectory.metadata["num_compactions"] == script.count(SUMMARY)
    assert len({request.seed for request in engine.requests}) == len(script)
    play(again, at_tokens=at_tokens)
    assert [request.seed for request in again.requests] == [request.seed for request in engine.requests]


def test_the_newest_turns_stay_where_they_fit():
    engine = ScriptedEngine(CALL, PLAIN_CALL, SUMMARY, ANSWER)
    play(engine, keep_turns=1)
    *_, after = texts(engine)
    assert "So far 580.<|im_end|>\n<|im_start|>assistant\n<tool_call>" in after
    assert after.count("<tool_response>") == 1
    assert '"1+1"' in after
    engine = ScriptedEngine(CALL, PLAIN_CALL, SUMMARY, ANSWER)
    play(engine, keep_turns=5)
    assert texts(engine)[-1].count("<tool_response>") == 1, "both do not fit"


def test_a_rule_writes_the_summary():
    seen = []

    async def rule(messages):
        seen.append([message["role"] for message in messages])
        messages.clear()
        return f"{len(seen)} done <|im_end|>"

    engine = ScriptedEngine(CALL, PLAIN_CALL, ANSWER)
    trajectory = play(engine, rule=rule)
    assert seen == [["user", *["assistant", "tool"] * 2]]
    assert "1 done < |im_end|><|im_end|>\n<|im_start|>assistant\n" in texts(engine)[-1]
    assert [segment.loss_mask[-1] for segment in trajectory.segments] == [True, True]
    assert trajectory.num_turns == 3


@pytest.mark.parametrize("written", [None, RuntimeError("broken"), SystemExit(2), ValueError("no")])
def test_a_rule_that_fails_fails_the_trajectory(written):
    def rule(messages):
        if written is None:
            return None
        raise written

    trajectory = play(ScriptedEngine(CALL, PLAIN_CALL), rule=rule)
    assert trajectory.status is Status.failed
    assert "agent.compaction.function: r" in trajectory.metadata["error"]
    assert trajectory.num_sampled_tokens > 0


@pytest.mark.parametrize(("finish", "status"), [("length", Status.truncated), ("abort", Status.aborted)])
def test_a_summary_without_an_end_ends_the_trajectory_within_its_turn(finish, status):
    trajectory = play(ScriptedEngine(CALL, PLAIN_CALL, (SUMMARY, finish)))
    assert trajectory.status is status
    assert trajectory.num_turns == trajectory.metadata["num_turns"] == 3
    assert trajectory.segments[-1].turn_ids[-1] == 2


def test_the_last_turn_has_no_summary_and_a_context_without_room_is_truncated():
    engine = ScriptedEngine(CALL, PLAIN_CALL)
    assert play(engine, max_turns=2).status is Status.truncated
    long = ScriptedEngine(CALL, PLAIN_CALL, SUMMARY)
    assert play(long, max_trajectory_tokens=180).status is Status.truncated
    assert len(long.requests) == 2
