"""Environments of one's own in episodes: what they see, what the policy is told, deadlines, failures, and figures."""

import asyncio
import json
import re

import pytest
from test_episode import CHAT, PROMPT, TOKENIZER, ScriptedEngine, encode, runner_of

from slimrl.agent.environment import Observation, answers
from slimrl.agent.tools import ToolBox
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status, from_json, to_json

SCHEMA = {
    "type": "function",
    "function": {"name": "move", "description": "Move.", "parameters": {"type": "object", "properties": {}}},
}
MOVE = '<tool_call>\n{"name": "move", "arguments": {"by": 2}}\n</tool_call>'
WORDS = "I go on.<|im_end|>"
FIRST = [{"role": "system", "content": "Walk."}, {"role": "user", "content": "You are at 0."}]


class Walk:
    """A walk to 4, by calls or by words; notes what it is asked."""

    def __init__(self, log, tools=(SCHEMA,), **options):
        self.log, self.tools, self.options, self.at = log, tools, options, 0

    async def start(self, prompt, *, seed, scratch):
        self.log.append(("start", prompt.label, seed))
        scratch["starts"] = scratch.get("starts", 0) + 1
        scratch["path"] = self.path = [0]
        await self.fault("start")
        return Observation(messages=FIRST, tools=self.tools, state_id="0")

    async def step(self, turn):
        self.log.append(("step", turn.index, turn.text, [getattr(call, "arguments", None) for call in turn.calls]))
        await self.fault("step")
        self.at += 2 if turn.calls else 1
        self.path.append(self.at)
        told = [f"You are at {self.at}."]
        messages = answers(turn, told) if turn.calls else [{"role": "user", "content": told[0]}]
        return Observation(
            messages=messages, reward=self.at / 10, done=self.at >= 4, state_id=str(self.at),
            metrics={"distance": 4 - self.at}, tool_errors=["move"] * (self.at == 2),
        )  # fmt: skip

    async def close(self):
        self.log.append(("close",))
        await self.fault("close")

    async def fault(self, where):
        fault = self.options.get(where)
        if isinstance(fault, float):
            await asyncio.sleep(fault)
        elif fault is not None:
            raise fault


def walk(engine, log=None, *, agent=None, walks=None, **limits):
    log = [] if log is None else log
    settings = AgentConfig(**{"environment": "walks:Walk", "start_retries": 0, **(agent or {})})
    make = walks or (lambda: Walk(log))
    runner = runner_of(engine, ToolBox([]), agent=settings, environment=make, **limits)
    sampling = SamplingConfig(max_new_tokens=64)
    return asyncio.run(runner.run(PROMPT, trajectory_id="t:1", sampling=sampling, seed=11))


def text_of(tokens):
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


def rendering(messages, tools):
    """By transformers alone."""
    return TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


def test_calls_and_words_are_answered_as_the_template_writes_it_until_the_environment_is_done():
    log = []
    engine = ScriptedEngine(MOVE + "<|im_end|>", WORDS, WORDS)
    trajectory = walk(engine, log, stop_at_tool_call=False)
    assert trajectory.status is Status.completed
    assert [entry[0] for entry in log] == ["start", "step", "step", "step", "close"]
    assert log[1:4] == [("step", 0, "", [{"by": 2}]), ("step", 1, "I go on.", []), ("step", 2, "I go on.", [])]
    call = {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": {"by": 2}}}
    conversation = [
        *FIRST,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "move", "tool_call_id": "call_0", "content": "You are at 2."},
        {"role": "assistant", "content": "I go on."},
        {"role": "user", "content": "You are at 3."},
    ]
    assert trajectory.messages[:-1] == conversation
    for number, context in ((2, conversation[:2]), (4, conversation[:4]), (6, conversation)):
        request = engine.requests[number // 2 - 1]
        assert text_of(request.input_ids) == rendering(context, [SCHEMA])
    (segment,) = trajectory.segments
    assert segment.tokens[segment.loss_mask].tolist() == encode(MOVE + "<|im_end|>") + 2 * encode(WORDS)


def test_what_it_gives_reaches_the_trajectory_and_its_file():
    trajectory = walk(ScriptedEngine(MOVE, WORDS, WORDS))
    report = trajectory.metadata["environment"]
    assert report["rewards"] == [0.2, 0.3, 0.4]
    assert report["states"] == ["0", "2", "3"]
    assert report["metrics"] == {"distance": 0.0}
    assert trajectory.metadata["num_tool_calls"] == trajectory.metadata["num_tool_errors"] == 1
    assert trajectory.metadata["num_prompt_messages"] == 2
    assert trajectory.scratch == {"starts": 1, "path": [0, 2, 3, 4]}
    written = json.loads(json.dumps(to_json(trajectory)))
    assert not {"scratch", "times"} & written.keys()
    assert from_json(written).metadata == trajectory.metadata


def test_the_last_turn_is_stepped_and_truncates_what_it_does_not_complete():
    log = []
    trajectory = walk(ScriptedEngine(MOVE, WORDS), log, max_turns=2)
    assert trajectory.status is Status.truncated
    assert [entry[0] for entry in log] == ["start", "step", "step", "close"]
    assert trajectory.messages[-1] == {"role": "assistant", "content": "I go on."}
    assert trajectory.segments[0].loss_mask[-1]
    assert walk(ScriptedEngine(MOVE, MOVE), max_turns=2).status is Status.completed


def test_a_turn_that_runs_out_of_tokens_is_not_stepped_and_has_no_reward():
    trajectory = walk(ScriptedEngine(MOVE, (encode(WORDS)[:2], "length")))
    assert trajectory.status is Status.truncated
    assert trajectory.metadata["environment"]["rewards"] == [0.2, 0.0]
    assert trajectory.metadata["environment"]["states"] == ["0", "2"]


@pytest.mark.parametrize(
    ("options", "limits", "said"),
    [
        ({"start": OSError("no room")}, {}, r"walks:Walk: start raised OSError\('no room'\)"),
        ({"start": 5.0}, {"start_timeout_s": 0.05}, "walks:Walk: start took longer than 0.05 s"),
        ({"step": KeyError("x")}, {}, r"walks:Walk: step raised KeyError\('x'\)"),
        ({"step": 5.0}, {"step_timeout_s": 0.05}, "walks:Walk: step took longer than 0.05 s"),
        ({"step": SystemExit(3)}, {}, r"walks:Walk: step raised .*SystemExit\(3\)"),
    ],
)
def test_an_environment_that_raises_or_is_late_fails_its_trajectory_and_is_closed(options, limits, said):
    log = []
    trajectory = walk(ScriptedEngine(WORDS), agent=limits, walks=lambda: Walk(log, **options))
    assert trajectory.status is Status.failed
    assert re.match(said, trajectory.metadata["error"])
    assert log[-1] == ("close",)
    assert sum(entry == ("close",) for entry in log) == 1


@pytest.mark.parametrize("fault", [RuntimeError("stuck"), 5.0])
def test_a_close_that_fails_or_hangs_costs_its_deadline_and_nothing_else(fault):
    trajectory = walk(ScriptedEngine(MOVE, MOVE), agent={"close_timeout_s": 0.05}, walks=lambda: Walk([], close=fault))
    assert trajectory.status is Status.completed
    assert trajectory.measured["close_s"] < 2


def test_a_start_is_tried_again_with_a_new_instance_and_a_clean_scratch():
    log, made = [], []

    def make():
        made.append(Walk(log, **({"start": OSError("no room")} if len(made) < 2 else {})))
        return made[-1]

    trajectory = walk(ScriptedEngine(MOVE, MOVE), agent={"start_retries": 2}, walks=make)
    assert trajectory.status is Status.completed
    assert len(made) == 3
    assert trajectory.metadata["environment"]["start_retries"] == 2
    assert [entry[0] for entry in log] == ["start", "close", "start", "close", "start", "step", "step", "close"]
    assert trajectory.scratch == {"starts": 1, "path": [0, 2, 4]}


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        (None, "returned None, not an Observation"),
        (Observation(), "gave no messages, and the episode is not over"),
        (Observation(messages=FIRST[1:], reward="much"), "reward is 'much', not a number"),
        (Observation(messages=FIRST[1:], reward=float("nan")), "reward is nan, not a finite number"),
        (Observation(messages=[{"role": "assistant"}]), "cannot be written: 'content'"),
        (Observation(messages=[{"role": "narrator"}]), "step: messages must be a list of"),
        (Observation(messages="Go on."), "step: messages must be a list of .*, not 'Go on.'"),
        (Observation(messages=FIRST[1]), "step: messages must be a list of"),
        (Observation(messages=["Go on."]), "step: messages must be a list of"),
        (Observation(messages=[{"role": "user", "content": None}]), "step: messages must be a list of"),
        (Observation(messages=FIRST[1:], tool_errors="move"), "step: tool_errors must be a list of names, not 'move'"),
        (Observation(messages=FIRST[1:], tool_errors=None), "step: tool_errors must be a list of names, not None"),
    ],
)
def test_an_answer_that_is_none_is_refused(observation, said):
    class Odd(Walk):
        async def step(self, turn):
            return observation

    trajectory = walk(ScriptedEngine(WORDS), walks=lambda: Odd([]))
    assert trajectory.status is Status.failed
    assert re.search(said, trajectory.metadata["error"])


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (Observation(messages="Walk."), "start: messages must be a list of"),
        (Observation(messages=FIRST, tools=[walk]), "start: tools must be a list of JSON schemas"),
        (Observation(messages=FIRST, tools=SCHEMA), "start: tools must be a list of JSON schemas"),
        (Observation(messages=FIRST, tools=[{**SCHEMA, "strict": walk}]), "does not fit the chat template: .*JSON"),
        (Observation(messages=[{"role": "user", "content": "\ud83d"}]), "does not fit the chat template"),
    ],
)
def test_a_start_that_the_policy_cannot_be_shown_fails_the_trajectory_alone(first, said):
    class Odd(Walk):
        async def start(self, prompt, *, seed, scratch):
            return first

    trajectory = walk(ScriptedEngine(WORDS), walks=lambda: Odd([]))
    assert trajectory.status is Status.failed
    assert re.search(said, trajectory.metadata["error"])


def test_an_environment_that_exits_where_it_is_made_fails_the_trajectory_alone():
    def make():
        raise SystemExit(3)

    trajectory = walk(ScriptedEngine(WORDS), walks=make)
    assert "raised SystemExit(3)" in trajectory.metadata["error"]


def test_calls_and_errors_of_a_last_turn_are_counted():
    class Errs(Walk):
        async def step(self, turn):
            return Observation(tool_errors=["move"], done=True)

    def counts(**limits):
        metadata = walk(ScriptedEngine(MOVE), walks=lambda: Errs([]), **limits).metadata
        return metadata["num_tool_calls"], metadata["num_tool_errors"]

    assert counts(max_turns=2) == (1, 1)
    assert counts(max_turns=1) == (1, 1)


def test_an_environment_is_closed_when_the_trajectory_meets_its_deadline():
    log = []
    trajectory = walk(ScriptedEngine(MOVE, 30.0, WORDS), log, trajectory_timeout_s=0.2)
    assert trajectory.status is Status.aborted
    assert log[-1] == ("close",)


def test_the_policy_may_end_the_text_after_which_nothing_is_told_it():
    end = CHAT.template.encode("<|im_end|>")[0]
    log = []

    class Ended(Walk):
        async def step(self, turn):
            self.log.append(turn.finish_reason)
            return await super().step(turn)

    chat = type(CHAT)(CHAT.template, [end, other := next(i for i in range(20) if i != end)])
    runner = runner_of(
        ScriptedEngine([*encode("I go on."), other]), ToolBox([]), chat=chat,
        agent=AgentConfig(environment="walks:Walk"), environment=lambda: Ended(log),
    )  # fmt: skip
    trajectory = asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=SamplingConfig(), seed=1))
    assert "end" in log
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_turns"] == 1


async def only_once(episode):
    turn = await episode.sample_turn()
    observation = await episode.step(turn)
    assert episode.append_observation(turn, observation)
    return Status.truncated


async def gives_nothing(episode):
    return None


async def breaks(episode):
    raise LookupError("lost")


async def exits(episode):
    raise SystemExit(4)


async def awaits_what_it_cancelled(episode):
    task = asyncio.create_task(asyncio.sleep(1))
    task.cancel()
    await task


def test_an_episode_loop_of_ones_own_has_the_episode_in_its_hands():
    def run_with(loop):
        agent = AgentConfig(environment="walks:Walk", episode="loops:mine")
        runner = runner_of(
            ScriptedEngine(WORDS), ToolBox([]), agent=agent, environment=lambda: Walk([]), episode_loop=loop
        )
        return asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=SamplingConfig(), seed=1))

    assert run_with(only_once).status is Status.truncated
    assert run_with(only_once).messages[-1] == {"role": "user", "content": "You are at 1."}
    assert run_with(gives_nothing).metadata["error"] == "loops:mine returned None, not a Status"
    assert run_with(breaks).metadata["error"] == "loops:mine raised LookupError('lost')"
    assert run_with(exits).metadata["error"] == "loops:mine raised SystemExit(4)"
    assert run_with(awaits_what_it_cancelled).metadata["error"] == "loops:mine raised CancelledError()"
