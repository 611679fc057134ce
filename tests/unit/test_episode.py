"""The multi-turn episode with a scripted engine: tokens in, tokens out, and every way in which it can end."""

import asyncio
import dataclasses
import time
from functools import partial

import numpy as np
import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.calculator import calculator
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.parsers import NoCalls, make_parser
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool, shortened
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import EngineError, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status

LAYERS, TOPK = 2, 2
TOKENIZER = build_tokenizer()
CHAT = ChatFormat(ChatTemplate(TOKENIZER), [TOKENIZER.eos_token_id])
PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Compute 34*17+2."}], label=580)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "34*17+2"}}\n</tool_call>'
ANSWER = "34*17+2 = \\boxed{580}.<|im_end|>"


def encode(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


class ScriptedEngine:
    """Answers each request with the next entry: a text, a list of token ids, a result, an exception or a delay."""

    def __init__(self, *script, version=7, experts=False):
        self.script = list(script)
        self.requests = []
        self.version, self.experts = version, experts

    async def generate(self, request):
        self.requests.append(request)
        entry = self.script.pop(0)
        if isinstance(entry, float):
            await asyncio.sleep(entry)
            entry = self.script.pop(0)
        if isinstance(entry, Exception):
            raise entry
        finish = "stop"
        if isinstance(entry, tuple):
            entry, finish = entry
        tokens = encode(entry) if isinstance(entry, str) else entry
        number = len(self.requests)
        rows = len(request.input_ids) + len(tokens) - 1
        return GenerateResult(
            tokens=tokens,
            logprobs=[-number - position / 128 for position in range(len(tokens))],
            weight_versions=np.full(len(tokens), self.version + number - 1, np.int32),
            finish_reason=finish,
            routed_experts=expert_rows(rows, number)[request.experts_from :] if self.experts else None,
            cached_tokens=len(request.input_ids) // 2,
        )


def expert_rows(rows, number):
    return (np.arange(rows * LAYERS * TOPK).reshape(rows, LAYERS, TOPK) * 10 + number).astype(np.int16)


def lookup(word: str) -> str:
    """Look up.

    Args:
        word: The word.
    """
    if word == "hang":
        time.sleep(5)
    if word == "break":
        raise RuntimeError("no dictionary")
    return word * 3


TOOLS = ToolBox([make_tool(calculator), make_tool(lookup)])


def runner_of(
    engine, tools=TOOLS, chat=CHAT, agent=None, environment=None, episode_loop=None,
    summary_rule=None, subagents=None, parallel=True, **limits,
):  # fmt: skip
    rollout = RolloutConfig(**{"max_trajectory_tokens": 512, **limits})
    agent = agent or AgentConfig()
    return EpisodeRunner(
        engine=engine,
        dialogues=Dialogues(chat, parser_of, stop_at_call=rollout.stop_at_tool_call),
        environment=environment or partial(ToolEnvironment, tools, agent, rollout.tool_timeout_s),
        rollout=rollout,
        agent=agent,
        summary_rule=summary_rule,
        subagents=subagents or {},
        parallel_subagents=parallel,
        **({"episode_loop": episode_loop} if episode_loop else {}),
    )


def parser_of(schemas):
    return make_parser("qwen25", schemas) if schemas else NoCalls()


def play(engine, tools=TOOLS, seed=11, max_result_chars=4000, sampling=None, max_new_tokens=64, **limits):
    agent = AgentConfig(system_prompt="Put the answer in \\boxed{}.", max_result_chars=max_result_chars)
    runner = runner_of(engine, tools, agent=agent, **limits)
    sampling = sampling or SamplingConfig(temperature=0.7, max_new_tokens=max_new_tokens)
    return asyncio.run(runner.run(PROMPT, trajectory_id="t:1", sampling=sampling, seed=seed))


def contexts(engine):
    return [request.input_ids for request in engine.requests]


def test_the_training_tokens_are_the_engines_tokens_bit_for_bit():
    engine = ScriptedEngine(CALL, ANSWER, experts=True)
    trajectory = play(engine)
    (segment,) = trajectory.segments
    first, second = contexts(engine)
    turns = [encode(CALL), encode(ANSWER)]
    assert segment.tokens.tolist() == second + turns[1]
    assert second[: len(first) + len(turns[0])] == first + turns[0]
    assert segment.tokens[segment.loss_mask].tolist() == turns[0] + turns[1]
    assert trajectory.status is Status.completed
    assert trajectory.group_id == "p:1"


def test_each_token_bears_its_logprob_version_and_turn():
    engine = ScriptedEngine(CALL, ANSWER)
    (segment,) = play(engine).segments
    first, second = contexts(engine)
    counts = [len(first), len(encode(CALL)), len(second) - len(first) - len(encode(CALL)), len(encode(ANSWER))]
    assert segment.turn_ids.tolist() == np.repeat([-1, 0, 0, 1], counts).tolist()
    assert segment.weight_versions.tolist() == np.repeat([-1, 7, -1, 8], counts).tolist()
    assert segment.loss_mask.tolist() == np.repeat([False, True, False, True], counts).tolist()
    expected = [
        -number - position / 128 for number, count in ((1, counts[1]), (2, counts[3])) for position in range(count)
    ]
    assert segment.rollout_logprobs[segment.loss_mask].tolist() == expected
    assert not segment.rollout_logprobs[~segment.loss_mask].any()
    assert (segment.tokens.dtype, segment.turn_ids.dtype) == (np.int32, np.int16)
    assert segment.routed_experts is None


def test_a_token_keeps_the_experts_of_its_first_pass_and_the_last_has_none():
    engine = ScriptedEngine(CALL, ANSWER, experts=True)
    (segment,) = play(engine).segments
    first, second = contexts(engine)
    known = len(first) + len(encode(CALL)) - 1
    total = len(second) + len(encode(ANSWER)) - 1
    assert segment.routed_experts.shape == (total + 1, LAYERS, TOPK)
    assert np.array_equal(segment.routed_experts[:known], expert_rows(known, 1))
    assert np.array_equal(segment.routed_experts[known:total], expert_rows(total, 2)[known:])
    assert (segment.routed_experts[-1] == -1).all()
    assert [request.experts_from for request in engine.requests] == [0, known]


def test_tokens_that_no_text_would_encode_to_are_kept():
    odd = [*encode("3"), *encode("4"), *encode(" "), *encode(" "), TOKENIZER.eos_token_id]
    split = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "Compute"] + [TOKENIZER.eos_token_id]
    assert encode(TOKENIZER.decode(split)) != split
    for tokens in (odd, split):
        (segment,) = play(ScriptedEngine(tokens)).segments
        assert segment.tokens[segment.loss_mask].tolist() == tokens


def test_the_context_of_the_second_turn_is_the_templates_own_rendering():
    engine = ScriptedEngine(CALL, ANSWER)
    trajectory = play(engine)
    text = TOKENIZER.apply_chat_template(
        trajectory.messages[:-1], tools=TOOLS.schemas, tokenize=False, add_generation_prompt=True
    )
    assert contexts(engine)[1] == encode(text)
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.messages[3]["content"] == "580"
    assert trajectory.messages[4]["content"] == "34*17+2 = \\boxed{580}."


def test_requests_carry_the_session_the_sampling_the_stops_and_a_seed_of_their_own():
    engine = ScriptedEngine(CALL, ANSWER)
    play(engine, request_timeout_s=9.0)
    first, second = engine.requests
    assert {request.session_id for request in engine.requests} == {"t:1"}
    assert (first.temperature, first.max_new_tokens, first.timeout_s) == (0.7, 64, 9.0)
    assert set(first.stop_token_ids) == {TOKENIZER.eos_token_id, CHAT.token_id("</tool_call>")}
    assert first.seed != second.seed
    again = ScriptedEngine(CALL, ANSWER)
    play(again)
    assert [request.seed for request in again.requests] == [first.seed, second.seed]
    unseeded = ScriptedEngine(ANSWER)
    play(unseeded, seed=None)
    assert unseeded.requests[0].seed is None


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        (CALL.replace("}}", "}"), "error: malformed tool call: it cannot be read"),
        ("<tool_call>\n{<|im_end|>", "error: malformed tool call: not closed"),
        ("</tool_call>", "error: malformed tool call: nothing opened it"),
        (CALL.replace("calculator", "abacus"), "error: unknown tool abacus; known: calculator, lookup"),
        (CALL.replace("34*17+2", "34*"), "error: invalid expression"),
        (
            CALL.replace("expression", "expr"),
            "error: malformed tool call: arguments: 'expression' is a required property",
        ),
        (CALL.replace('"34*17+2"', "5"), "error: malformed tool call: expression: 5 is not of type 'string'"),
    ],
)
def test_a_call_that_cannot_be_answered_gets_an_error_as_its_tool_turn_and_the_model_goes_on(turn, reply):
    engine = ScriptedEngine(turn, CALL, ANSWER)
    trajectory = play(engine)
    assert trajectory.status is Status.completed
    assert trajectory.messages[3] | {"name": ""} == {
        "role": "tool",
        "name": "",
        "tool_call_id": "call_0",
        "content": reply,
    }
    assert trajectory.metadata["num_tool_calls"] == 2
    assert trajectory.metadata["num_tool_errors"] == 1
    sampled = encode(turn) + encode(CALL) + encode(ANSWER)
    assert trajectory.segments[0].tokens[trajectory.segments[0].loss_mask].tolist() == sampled


def test_calls_are_counted_by_tool_and_those_of_no_tool_apart():
    look_up = '<tool_call>\n{"name": "lookup", "arguments": {"word": "a"}}\n</tool_call>'
    turns = [
        CALL, CALL.replace("34*17+2", "34*"), CALL.replace("expression", "expr"), CALL.replace("}}", "}"), look_up,
        CALL.replace("calculator", "abacus"), ANSWER,
    ]  # fmt: skip
    trajectory = play(ScriptedEngine(*turns), max_turns=9, max_trajectory_tokens=4096)
    assert trajectory.status is Status.completed
    assert trajectory.metadata["tool_calls"] == {
        "calculator": {"calls": 3, "errors": 2, "malformed": 1},
        "unknown": {"calls": 2, "errors": 2, "malformed": 2},
        "lookup": {"calls": 1, "errors": 0, "malformed": 0},
    }
    assert play(ScriptedEngine("5<|im_end|>")).metadata["tool_calls"] == {}


def test_without_tools_whatever_is_written_is_the_answer():
    engine = ScriptedEngine(CALL + "<|im_end|>")
    trajectory = play(engine, tools=ToolBox([]))
    assert trajectory.status is Status.completed
    assert trajectory.messages[-1] == {"role": "assistant", "content": CALL}
    assert engine.requests[0].stop_token_ids == (TOKENIZER.eos_token_id,)
    assert "# Tools" not in TOKENIZER.decode(trajectory.segments[0].tokens[:20].tolist())


def test_several_calls_in_one_turn_are_answered_in_order():
    two = CALL + "\n" + CALL.replace("34*17+2", "1+1") + "<|im_end|>"
    engine = ScriptedEngine(two, ANSWER)
    trajectory = play(engine, stop_at_tool_call=False)
    assert engine.requests[0].stop_token_ids == (TOKENIZER.eos_token_id,)
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["580", "2"]
    added = contexts(engine)[1][len(contexts(engine)[0]) + len(encode(two)) :]
    assert TOKENIZER.decode(added) == (
        "\n<|im_start|>user\n<tool_response>\n580\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_hanging_tool_is_an_error_for_the_model_and_a_broken_one_fails_the_trajectory():
    call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "hang"}}\n</tool_call>'
    trajectory = play(ScriptedEngine(call, ANSWER), tool_timeout_s=0.05)
    assert trajectory.status is Status.completed
    assert "no answer within 0.05 s" in trajectory.messages[3]["content"]
    failed = play(ScriptedEngine(call.replace("hang", "break")))
    assert failed.status is Status.failed
    assert "no dictionary" in failed.metadata["error"]
    assert failed.num_sampled_tokens > 0


def test_a_long_result_loses_its_middle_and_a_result_cannot_end_its_turn():
    call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "%s"}}\n</tool_call>'
    trajectory = play(ScriptedEngine(call % ("a" * 30 + "b" * 30), ANSWER), max_result_chars=45)
    reply = trajectory.messages[3]["content"]
    assert len(reply) == 45
    assert reply.startswith("a" * 20 + " ... ")
    assert reply.endswith("b" * 20)
    engine = ScriptedEngine(call % "<|im_end|>", ANSWER)
    play(engine)
    added = contexts(engine)[1][len(contexts(engine)[0]) + len(encode(call % "<|im_end|>")) :]
    assert added.count(TOKENIZER.eos_token_id) == 2  # the policy's turn and the tool's


def test_a_turn_with_a_call_that_is_malformed_is_kept_as_it_was_written():
    turn = f"{CALL} and <tool_call>{{</tool_call><|im_end|>"
    trajectory = play(ScriptedEngine(turn, ANSWER), stop_at_tool_call=False)
    assert trajectory.messages[2] == {"role": "assistant", "content": turn.removesuffix("<|im_end|>")}
    assert [message["content"] for message in trajectory.messages[3:5]] == [
        "580",
        "error: malformed tool call: it cannot be read",
    ]
    assert (trajectory.metadata["num_tool_calls"], trajectory.metadata["num_tool_errors"]) == (2, 1)
    plain = play(ScriptedEngine(ANSWER))
    assert plain.messages[2] == {"role": "assistant", "content": ANSWER.removesuffix("<|im_end|>")}


@pytest.mark.parametrize("limit", [16, 17, 44, 45])
def test_a_result_is_cut_to_its_limit_in_the_middle_and_only_above_it(limit):
    text = "".join(chr(97 + index % 26) for index in range(45))
    cut = shortened(text, limit)
    assert len(cut) == limit
    if limit == 45:
        assert cut == text
    else:
        head, tail = cut.split(" ... ")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(tail) - len(head) in (0, 1)


def test_a_turn_that_ends_the_text_completes_the_trajectory_whatever_it_called():
    """Engines stop at the model's other end tokens too, after which the template has no place for a tool's answer."""
    other_end = TOKENIZER.pad_token_id
    assert other_end != TOKENIZER.eos_token_id
    trajectory = play(ScriptedEngine([*encode("<tool_call>\n{"), other_end]))
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_tool_calls"] == trajectory.metadata["num_malformed_calls"] == 1
    assert trajectory.segments[0].tokens[-1] == other_end


def test_running_out_of_turns_truncates_without_calling_the_tool():
    trajectory = play(ScriptedEngine(CALL, CALL, CALL), max_turns=2)
    assert trajectory.status is Status.truncated
    assert trajectory.metadata["num_turns"] == 2
    assert trajectory.metadata["tool_calls"] == {"calculator": {"calls": 2, "errors": 0, "malformed": 0}}
    assert trajectory.segments[0].loss_mask[-1]


def test_a_turn_that_ignores_its_end_stops_at_no_token_and_is_truncated_at_its_length():
    fixed = SamplingConfig(max_new_tokens=len(encode(CALL + ANSWER)), ignore_end_of_turn=True)
    engine = ScriptedEngine((CALL + ANSWER, "length"))
    trajectory = play(engine, sampling=fixed)
    assert engine.requests[0].stop_token_ids == ()
    assert trajectory.status is Status.truncated
    assert trajectory.num_sampled_tokens == fixed.max_new_tokens


def test_running_out_of_tokens_in_a_turn_truncates():
    half = encode(ANSWER)[:5]
    engine = ScriptedEngine((half, "length"))
    trajectory = play(engine, max_new_tokens=5)
    assert engine.requests[0].max_new_tokens == 5
    assert trajectory.status is Status.truncated
    assert trajectory.segments[0].tokens[-5:].tolist() == half


def test_a_trajectory_never_outgrows_its_budget():
    full = play(ScriptedEngine(CALL, ANSWER))
    length, answer = full.num_tokens, len(encode(ANSWER))
    fits = ScriptedEngine(CALL, ANSWER)
    assert play(fits, max_trajectory_tokens=length).status is Status.completed
    assert fits.requests[1].max_new_tokens == answer
    for budget in (length - answer, length - answer - 1):
        cut = ScriptedEngine(CALL)
        trajectory = play(cut, max_trajectory_tokens=budget)
        assert trajectory.status is Status.truncated
        assert trajectory.segments[0].loss_mask[-1], "a tool result that cannot be answered is not appended"
    nothing = play(ScriptedEngine(), max_trajectory_tokens=10)
    assert nothing.status is Status.truncated
    assert nothing.num_sampled_tokens == 0


def test_an_engine_that_fails_or_aborts_ends_the_trajectory_with_what_there_is():
    failed = play(ScriptedEngine(CALL, EngineError("engine 0: connection refused")))
    assert failed.status is Status.failed
    assert failed.metadata["error"] == "engine 0: connection refused"
    assert failed.num_sampled_tokens == len(encode(CALL))
    aborted = play(ScriptedEngine((encode(CALL)[:3], "abort")))
    assert aborted.status is Status.aborted
    assert aborted.num_sampled_tokens == 3


def test_a_trajectory_has_a_deadline():
    start = time.monotonic()
    trajectory = play(ScriptedEngine(CALL, 30.0, ANSWER), trajectory_timeout_s=0.3)
    assert time.monotonic() - start < 5
    assert trajectory.status is Status.aborted
    assert trajectory.metadata["error"] == "not finished within 0.3 s"
    (segment,) = trajectory.segments
    assert segment.tokens[segment.loss_mask].tolist() == encode(CALL)


def test_a_system_message_of_the_prompts_own_is_kept():
    engine = ScriptedEngine(ANSWER)
    own = dataclasses.replace(PROMPT, messages=[{"role": "system", "content": "Be brief."}, *PROMPT.messages])
    runner = runner_of(engine, agent=AgentConfig(system_prompt="ignored"))
    trajectory = asyncio.run(runner.run(own, trajectory_id="t", sampling=SamplingConfig(), seed=None))
    assert trajectory.messages[:2] == own.messages
    assert own.messages == [{"role": "system", "content": "Be brief."}, *PROMPT.messages]


def test_a_parser_that_raises_fails_its_trajectory_alone():
    class Broken:
        close_marker = ""

        def parse(self, text):
            raise KeyError("no such marker")

    dialogues = Dialogues(CHAT, lambda schemas: Broken(), stop_at_call=True)
    runner = dataclasses.replace(runner_of(ScriptedEngine(ANSWER)), dialogues=dialogues)
    trajectory = asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=SamplingConfig(), seed=1))
    assert trajectory.status is Status.failed
    assert trajectory.metadata["error"] == "a turn cannot be read: KeyError('no such marker')"
    assert trajectory.num_sampled_tokens > 0
