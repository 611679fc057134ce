"""Sub-agents: what they see and may use, what their caller is told, and how their tokens are trained."""

import asyncio
import json

import numpy as np
import pytest
from test_episode import CHAT, ScriptedEngine, encode, expert_rows, runner_of

from slimrl.agent.calculator import calculator
from slimrl.agent.subagents import subagent_tool
from slimrl.agent.tools import EpisodeInfo, ToolBox, make_tool
from slimrl.config.schema.agent import AgentConfig, CompactionConfig, SubagentConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import EngineError
from slimrl.data.packing import ADVANTAGES, pack
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, from_json, to_json
from slimrl.rollout.statistics import rollout_metrics

TASK, END = "Add up 1+1.", "<|im_end|>"
PROMPT = Prompt(prompt_id="p", messages=[{"role": "user", "content": "Ask."}], label="")


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def ask(task):
    return call("helper", task=task)


class TalkingEngine(ScriptedEngine):
    """Answers a context by the first of its cues that the text since the last user or tool message holds."""

    def __init__(self, cues, delays=None, experts=False):
        super().__init__(experts=experts)
        self.cues, self.delays = cues, delays or {}
        self.at_once = self.most_at_once = 0

    async def generate(self, request):
        said = CHAT.template.decode(request.input_ids).split("<|im_start|>user")[-1]
        cue = next(cue for cue in self.cues if cue in said)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delays.get(cue, 0))
        self.at_once -= 1
        self.script = [self.cues[cue]]
        return await super().generate(request)


def note(word: str, info: EpisodeInfo) -> str:
    """Note.

    Args:
        word: A word.
    """
    info.scratch[word] = info.seed
    return "noted"


def play(engine, *, seed=5, parallel=True, max_tool_calls=None, compaction=None, subagent_turns=4, **limits):
    helper = SubagentConfig(description="Helps.", system_prompt="You help.", max_turns=subagent_turns)
    agent = AgentConfig(
        system_prompt="You lead.", subagents={"helper": helper}, max_tool_calls=max_tool_calls,
        compaction=compaction or CompactionConfig(),
    )  # fmt: skip
    runner = runner_of(
        engine,
        ToolBox([make_tool(calculator), subagent_tool("helper", helper)]),
        agent=agent,
        subagents={"helper": ToolBox([make_tool(calculator), make_tool(note)])},
        parallel=parallel,
        **{"max_turns": 12, "max_trajectory_tokens": 4000, **limits},
    )
    return asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=SamplingConfig(max_new_tokens=200), seed=seed))


ONE = {
    "Ask.": ask(TASK),
    TASK: call("calculator", expression="1+1"),
    "\n2\n": f"It is two.{END}",
    "It is two.": f"Two.{END}",
}


def test_a_sub_agent_works_in_a_context_of_its_own_and_its_last_words_are_the_answer():
    engine = TalkingEngine(ONE, experts=True)
    trajectory = play(engine)
    assert trajectory.status is Status.completed
    lead, begun, goes_on, told = (CHAT.template.decode(request.input_ids) for request in engine.requests)
    assert '"helper", "description": "Helps."' in lead
    assert "You help." in begun
    assert "You lead." not in begun
    assert "Ask." not in begun
    assert "helper" not in begun, "it has no sub-agents"
    assert "note" in begun
    assert goes_on.startswith(begun)
    assert told.endswith("<tool_response>\nIt is two.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    # Two segments: the sub-agent's, all of its tokens in the turn that called it, and the caller's.
    of_helper, of_lead = trajectory.segments
    assert of_helper.tokens.tolist() == engine.requests[2].input_ids + encode(ONE["\n2\n"])
    assert set(of_helper.turn_ids[of_helper.loss_mask]) == {0}
    assert of_helper.turn_ids[0] == -1
    assert of_lead.tokens.tolist() == engine.requests[3].input_ids + encode(ONE["It is two."])
    assert set(of_lead.turn_ids[of_lead.loss_mask]) == {0, 1}
    rows = len(engine.requests[1].input_ids)
    np.testing.assert_array_equal(of_helper.routed_experts[:rows], expert_rows(rows, 2))
    assert trajectory.num_turns == trajectory.metadata["num_turns"] == 2
    assert trajectory.metadata["num_subagents"] == 1
    (account,) = trajectory.metadata["subagents"]
    assert (account["name"], account["turn"], account["call"], account["status"]) == ("helper", 0, 0, "completed")
    assert trajectory.segments[slice(*account["segments"])] == [of_helper]
    said = [message["content"] for message in account["messages"][account["num_prompt_messages"] :]]
    assert [message["role"] for message in account["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[-1] == "It is two."
    assert "It is two." not in [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    calls = {name: counts["calls"] for name, counts in trajectory.metadata["tool_calls"].items()}
    assert calls == {"helper": 1, "calculator": 1}
    assert trajectory.metadata["num_tool_calls"] == 2
    assert rollout_metrics([trajectory], 1.0)["rollout/subagents_mean"] == 1
    read = from_json(json.loads(json.dumps(to_json(trajectory))))
    assert [one.tokens.tolist() for one in read.segments] == [one.tokens.tolist() for one in trajectory.segments]


def test_its_tokens_are_trained_with_the_advantage_of_the_turn_that_called_it():
    trajectory = play(TalkingEngine(ONE))
    of_turns = np.array([10.0, 20.0], np.float32)
    sizes = {"budget_tokens": 10_000, "alignment": 1, "data_parallel": 1}
    ((batch,),) = pack([trajectory.segments], np.zeros(1, np.float32), [of_turns], **sizes)
    trained = batch.added[ADVANTAGES][batch.mask]
    assert sorted(set(trained.tolist())) == [10.0, 20.0]
    of_first = sum(len(encode(ONE[cue])) for cue in ("Ask.", TASK, "\n2\n"))
    assert (trained == 10.0).sum() == of_first
    assert set(batch.trajectory_ids[batch.mask].tolist()) == {0}


BOTH = {
    "Ask.": ask("first") + "\n" + ask("second"),
    "first": f"One.{END}",
    "second": f"Two.{END}",
    "One.": f"Done.{END}",
}


@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (False, 1)])
def test_those_of_one_turn_run_at_once_or_in_turn_with_the_same_trajectory(parallel, most):
    engine = TalkingEngine(BOTH, delays={"first": 0.05})
    trajectory = play(engine, parallel=parallel)
    assert engine.most_at_once == most
    assert trajectory.status is Status.completed
    told = CHAT.template.decode(engine.requests[-1].input_ids)
    assert told.index("One.") < told.index("Two.")
    first, second, _ = (CHAT.template.decode(segment.tokens.tolist()) for segment in trajectory.segments)
    assert "first" in first
    assert "second" in second, "in the order of the calls"
    by_context = {tuple(request.input_ids): request.seed for request in engine.requests}
    assert len(set(by_context.values())) == 4
    again = TalkingEngine(BOTH)
    play(again)
    assert {tuple(request.input_ids): request.seed for request in again.requests} == by_context


def test_turns_tokens_and_calls_are_the_trajectorys():
    loops = {
        "Ask.": ask(TASK),
        TASK: call("calculator", expression="1+1"),
        "\n2\n": call("calculator", expression="1+1"),
    }
    told = {**loops, "error: it ran out": f"Well.{END}"}
    # Its own limit of turns.
    trajectory = play(TalkingEngine(told))
    assert (trajectory.status, trajectory.num_turns) == (Status.completed, 2)
    assert trajectory.metadata["num_tool_errors"] == 1
    assert trajectory.metadata["num_tool_calls"] == 5
    # Those of the trajectory: 5 less the turn that called it and one for the answer.
    engine = TalkingEngine(told)
    trajectory = play(engine, max_turns=5, subagent_turns=9)
    assert (trajectory.status, len(engine.requests)) == (Status.completed, 5)
    # The turns that it used are used.
    engine = TalkingEngine({**told, "error: it ran out": call("calculator", expression="1+1")})
    assert play(engine, max_turns=5, subagent_turns=9).status is Status.truncated
    assert len(engine.requests) == 5
    # Tokens.
    engine = TalkingEngine(told)
    trajectory = play(engine, subagent_turns=50, max_turns=99, max_trajectory_tokens=500)
    assert sum(map(len, trajectory.segments)) <= 500
    assert trajectory.metadata["num_tool_errors"] == 1
    # Calls: its own one is the limit's last.
    trajectory = play(TalkingEngine({**loops, "error: it": f"Well.{END}", "no tool calls": f"None.{END}",
                                     "None.": f"None.{END}"}), max_tool_calls=1)  # fmt: skip
    assert trajectory.metadata["tool_calls"]["calculator"]["errors"] == 1


def test_nothing_is_left_to_share_for_too_many_of_them():
    engine = TalkingEngine({"Ask.": "\n".join([ask("first")] * 3), "no turns or tokens": f"So be it.{END}"})
    trajectory = play(engine, max_turns=4)
    assert trajectory.status is Status.completed
    assert len(engine.requests) == 2
    assert trajectory.metadata["tool_calls"]["helper"] == {"calls": 3, "errors": 3, "malformed": 0}
    assert {"num_subagents", "subagents"} & trajectory.metadata.keys() == set()


def test_one_that_fails_fails_the_trajectory_and_ends_the_others():
    class Failing(TalkingEngine):
        async def generate(self, request):
            if "second" in CHAT.template.decode(request.input_ids).split("user\n")[-1]:
                raise EngineError("gone")
            return await super().generate(request)

    engine = Failing(BOTH, delays={"first": 5.0})
    trajectory = play(engine)
    assert trajectory.status is Status.failed
    assert trajectory.metadata["error"] == "sub-agent helper: gone"
    assert engine.at_once == 1, "the one that was cancelled has not answered"


def test_it_shares_the_scratch_and_words_of_its_task_open_no_turn():
    words = "note <|im_end|> it"
    engine = TalkingEngine({"Ask.": ask(words), "< |im_end|>": call("note", word="w"), "noted": f"Yes.{END}",
                            "Yes.": f"Done.{END}"})  # fmt: skip
    trajectory = play(engine)
    assert trajectory.status is Status.completed
    assert set(trajectory.scratch) == {"w"}


def test_a_context_of_the_caller_is_compacted_after_one():
    engine = TalkingEngine(ONE)
    play(engine)
    longest = max(len(request.input_ids) for request in engine.requests)
    assert longest == len(engine.requests[-1].input_ids), "the caller's"
    engine = TalkingEngine({"Summarize": f"Sum.{END}", "Sum.": f"Two.{END}", **ONE})
    trajectory = play(engine, compaction=CompactionConfig(at_tokens=longest, prompt="Summarize.", keep_turns=0))
    assert trajectory.status is Status.completed
    helper, first, second = trajectory.segments
    assert [set(one.turn_ids[one.loss_mask]) for one in (helper, first, second)] == [{0}, {0, 1}, {1}]
    assert trajectory.num_turns == 2
