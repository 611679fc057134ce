"""Real clients and agent frameworks ask the policy through the gateway; the engine behind it is scripted.

What each trajectory trains is compared with what the engine sampled, token for token.
"""

import asyncio
import json
from functools import partial
from typing import Any

import agents
import anthropic
import httpx
import openai
import pytest
from gateway_agents import (
    ANSWER,
    CALL,
    PARAMETERS,
    TOOL,
    ScriptedEngine,
    assert_every_sample_is_trained_once,
    encode,
    play,
    trained,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from slimrl.agent.calculator import calculator
from slimrl.agent.gateway.connection import Connection
from slimrl.data.engine import EngineError
from slimrl.data.trajectory import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SYSTEM = {"role": "system", "content": "Put the answer in \\boxed{}."}
ANSWERED = "34*17+2 = \\boxed{580}."


def chat_client(connection: Connection, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=connection.openai_base_url, api_key=connection.api_key, **options)


def result_of(call: Any) -> dict[str, str]:
    value = calculator(json.loads(call.function.arguments)["expression"])
    return {"role": "tool", "tool_call_id": call.id, "content": value}


async def loop(line: Any, connection: Connection) -> None:
    """The usual loop of an agent with tools, as it is written for OpenAI's own models."""
    client = chat_client(connection)
    messages: list[Any] = [SYSTEM, *line["messages"]]
    while True:
        answer = await client.chat.completions.create(model="gpt", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        messages += map(result_of, message.tool_calls)


def assert_one_segment_of_a_call_and_an_answer(trajectory: Any, engine: ScriptedEngine) -> None:
    assert trajectory.status is Status.completed, trajectory.metadata
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(CALL) + encode(ANSWER)]
    assert_every_sample_is_trained_once(trajectory, engine)
    assert [message["role"] for message in trajectory.messages][-4:] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[-2]["content"] == "580"
    assert trajectory.messages[-1]["content"] == ANSWERED
    assert trajectory.metadata["num_turns"] == 2
    assert trajectory.metadata["tool_calls"] == {"calculator": {"calls": 1, "errors": 0, "malformed": 0}}


async def test_a_loop_over_chat_completions_is_one_segment():
    engine = ScriptedEngine([CALL, ANSWER])
    assert_one_segment_of_a_call_and_an_answer(await play(engine, loop), engine)


async def test_a_synchronous_agent_runs_in_a_thread():
    def agent(line: Any, connection: Connection) -> None:
        client = openai.OpenAI(base_url=connection.openai_base_url, api_key=connection.api_key)
        messages = [SYSTEM, *line["messages"]]
        message = client.chat.completions.create(model="gpt", messages=messages, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        client.chat.completions.create(model="gpt", messages=[*messages, message, result_of(call)], tools=[TOOL])

    engine = ScriptedEngine([CALL, ANSWER])
    assert_one_segment_of_a_call_and_an_answer(await play(engine, agent), engine)


async def test_streams_of_chat_completions_are_whole():
    told = []
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}

    async def agent(line: Any, connection: Connection) -> None:
        client = chat_client(connection)
        messages: list[Any] = [SYSTEM, *line["messages"]]
        for _ in range(2):
            async with client.chat.completions.stream(model="gpt", messages=messages, tools=[strict]) as stream:
                async for event in stream:
                    told.append(event.type)
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message)
            messages += map(result_of, message.tool_calls or ())

    engine = ScriptedEngine([CALL, ANSWER])
    assert_one_segment_of_a_call_and_an_answer(await play(engine, agent), engine)
    assert {"tool_calls.function.arguments.done", "content.delta", "content.done"} <= set(told)


async def test_logprobs_and_usage_are_those_of_the_tokens():
    seen = []

    async def agent(line: Any, connection: Connection) -> None:
        create = chat_client(connection).chat.completions.create
        seen.append(await create(model="gpt", messages=line["messages"], logprobs=True))
        options = {"include_usage": True}
        stream = await create(model="gpt", messages=line["messages"], stream=True, stream_options=options)
        seen.append([chunk async for chunk in stream])

    engine = ScriptedEngine([ANSWER, ANSWER])
    trajectory = await play(engine, agent)
    whole, chunks = seen
    listed = whole.choices[0].logprobs.content
    ((tokens, logprobs), _) = trained(trajectory)
    assert [one.token_id for one in listed] == tokens
    assert [one.logprob for one in listed] == logprobs
    context = len(engine.requests[0].input_ids)
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (context, len(encode(ANSWER)))


async def test_a_loop_over_anthropics_messages_is_one_segment():
    async def agent(line: Any, connection: Connection) -> None:
        client = anthropic.AsyncAnthropic(base_url=connection.anthropic_base_url, api_key=connection.api_key)
        tools = [{"name": "calculator", "description": "Evaluate arithmetic.", "input_schema": PARAMETERS}]
        messages: list[Any] = list(line["messages"])
        while True:
            answer = await client.messages.create(
                model="claude", max_tokens=64, system=SYSTEM["content"], messages=messages, tools=tools
            )
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason != "tool_use":
                assert (answer.stop_reason, answer.content[0].text) == ("end_turn", ANSWERED)
                return
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": calculator(**one.input)}
                for one in answer.content
                if one.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})

    engine = ScriptedEngine([CALL, ANSWER])
    trajectory = await play(engine, agent)
    assert_one_segment_of_a_call_and_an_answer(trajectory, engine)
    # The same conversation as that of another API has the same tokens.
    other = await play(ScriptedEngine([CALL, ANSWER]), loop)
    assert trajectory.segments[0].tokens.tolist() == other.segments[0].tokens.tolist()


async def test_streams_of_anthropics_messages_are_whole():
    async def agent(line: Any, connection: Connection) -> None:
        client = anthropic.AsyncAnthropic(base_url=connection.anthropic_base_url, api_key=connection.api_key)
        tools = [{"name": "calculator", "input_schema": PARAMETERS}]
        messages: list[Any] = list(line["messages"])
        options = {"model": "claude", "max_tokens": 64, "tools": tools}
        async with client.messages.stream(messages=messages, **options) as stream:
            called = await stream.get_final_message()
        (use,) = [one for one in called.content if one.type == "tool_use"]
        assert use.input == {"expression": "34*17+2"}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "580"}]}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=messages, **options) as stream:
            assert "".join([text async for text in stream.text_stream]) == ANSWERED

    engine = ScriptedEngine(["Let me see.\n" + CALL, ANSWER])
    trajectory = await play(engine, agent)
    assert (trajectory.status, len(trajectory.segments)) == (Status.completed, 1)
    assert_every_sample_is_trained_once(trajectory, engine)


async def test_a_tools_error_is_told_to_the_policy():
    async def agent(line: Any, connection: Connection) -> None:
        client = anthropic.AsyncAnthropic(base_url=connection.anthropic_base_url, api_key=connection.api_key)
        options = {"model": "c", "max_tokens": 64, "tools": [{"name": "calculator", "input_schema": PARAMETERS}]}
        called = await client.messages.create(messages=line["messages"], **options)
        result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "no", "is_error": True}
        said = {"role": "assistant", "content": called.content}
        told = {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]}
        await client.messages.create(messages=[*line["messages"], said, told], **options)

    trajectory = await play(ScriptedEngine([CALL, ANSWER]), agent)
    assert [one["content"] for one in trajectory.messages[2:4]] == ["error: no", "Go on."]


async def test_a_loop_over_responses_is_one_segment():
    async def agent(line: Any, connection: Connection) -> None:
        client = chat_client(connection)
        tools = [{"type": "function", "name": "calculator", "description": "Evaluate arithmetic.",
                  "parameters": PARAMETERS, "strict": True}]  # fmt: skip
        items: list[Any] = list(line["messages"])
        while True:
            answer = await client.responses.create(
                model="gpt", instructions=SYSTEM["content"], input=items, tools=tools
            )
            items += answer.output
            calls = [one for one in answer.output if one.type == "function_call"]
            if not calls:
                assert answer.output_text == ANSWERED
                return
            for call in calls:
                value = calculator(json.loads(call.arguments)["expression"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": value})

    engine = ScriptedEngine([CALL, ANSWER])
    trajectory = await play(engine, agent)
    assert_one_segment_of_a_call_and_an_answer(trajectory, engine)
    other = await play(ScriptedEngine([CALL, ANSWER]), loop)
    assert trajectory.segments[0].tokens.tolist() == other.segments[0].tokens.tolist()


async def test_streams_of_responses_are_whole():
    async def agent(line: Any, connection: Connection) -> None:
        client = chat_client(connection)
        tools = [{"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}]
        async with client.responses.stream(model="gpt", input=line["messages"], tools=tools) as stream:
            called = await stream.get_final_response()
        (call,) = called.output
        items = [*line["messages"], {"type": "function_call", "call_id": call.call_id, "name": call.name,
                 "arguments": call.arguments}, {"type": "function_call_output", "call_id": call.call_id,
                 "output": "580"}]  # fmt: skip
        stream = await client.responses.create(model="gpt", input=items, tools=tools, stream=True)
        kinds = [event async for event in stream]
        assert "".join(one.delta for one in kinds if one.type == "response.output_text.delta") == ANSWERED
        assert [one.sequence_number for one in kinds] == list(range(len(kinds)))

    engine = ScriptedEngine([CALL, ANSWER])
    trajectory = await play(engine, agent)
    assert (trajectory.status, len(trajectory.segments)) == (Status.completed, 1)
    assert_every_sample_is_trained_once(trajectory, engine)


@pytest.mark.parametrize("model_of", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_agents_sdk_runs_unchanged(model_of: Any, streams: bool):
    agents.set_tracing_disabled(True)
    called = agents.function_tool(calculator)

    async def agent(line: Any, connection: Connection) -> None:
        model = model_of(model="policy", openai_client=chat_client(connection))
        solver = agents.Agent(name="solver", instructions=SYSTEM["content"], tools=[called], model=model)
        if streams:
            run = agents.Runner.run_streamed(solver, line["messages"])
            async for _ in run.stream_events():
                pass
        else:
            run = await agents.Runner.run(solver, line["messages"])
        assert run.final_output == ANSWERED

    engine = ScriptedEngine([CALL, ANSWER])
    assert_one_segment_of_a_call_and_an_answer(await play(engine, agent), engine)


async def test_a_handoff_to_another_agent_is_another_segment():
    agents.set_tracing_disabled(True)
    handoff = '<tool_call>\n{"name": "transfer_to_solver", "arguments": {}}\n</tool_call>'

    async def agent(line: Any, connection: Connection) -> None:
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=chat_client(connection))
        solver = agents.Agent(name="solver", instructions="Solve it.", model=model)
        first = agents.Agent(name="first", instructions="Hand it over.", handoffs=[solver], model=model)
        assert (await agents.Runner.run(first, line["messages"])).final_output == ANSWERED

    engine = ScriptedEngine([handoff, ANSWER])
    trajectory = await play(engine, agent)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(handoff), encode(ANSWER)]
    assert_every_sample_is_trained_once(trajectory, engine)


@pytest.mark.filterwarnings("ignore:create_react_agent")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("responses", [False, True])
async def test_an_agent_of_langgraph_runs_unchanged(streaming: bool, responses: bool):
    async def agent(line: Any, connection: Connection) -> None:
        model = ChatOpenAI(
            model="policy", base_url=connection.openai_base_url, api_key=connection.api_key, streaming=streaming,
            use_responses_api=responses,
        )  # fmt: skip
        graph = create_react_agent(model, [tool(calculator)], prompt=SYSTEM["content"])
        state = await graph.ainvoke({"messages": line["messages"]})
        assert state["messages"][-1].text == ANSWERED

    engine = ScriptedEngine([CALL, ANSWER])
    assert_one_segment_of_a_call_and_an_answer(await play(engine, agent), engine)


async def test_a_retry_after_a_timeout_is_no_branch():
    async def agent(line: Any, connection: Connection) -> None:
        client = chat_client(connection, timeout=1.0, max_retries=2)
        answer = await client.chat.completions.create(model="gpt", messages=line["messages"])
        assert answer.choices[0].message.content == ANSWERED

    engine = ScriptedEngine([30.0, ANSWER])
    trajectory = await play(engine, agent)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert engine.cancelled == 1
    assert len(engine.requests) == 2
    assert engine.requests[0].seed == engine.requests[1].seed
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(ANSWER)]
    assert trajectory.metadata["gateway"]["abandoned"] == 1


@pytest.mark.parametrize("error", [openai.BadRequestError, anthropic.BadRequestError])
async def test_a_spent_budget_reads_as_a_context_that_is_too_long(error: Any):
    async def agent(line: Any, connection: Connection) -> None:
        client: Any = anthropic.AsyncAnthropic(base_url=connection.anthropic_base_url, api_key=connection.api_key)
        create = partial(client.messages.create, model="m", max_tokens=9)
        if error is openai.BadRequestError:
            create = partial(chat_client(connection).chat.completions.create, model="m")
        await create(messages=line["messages"])
        with pytest.raises(error, match="maximum context length is 512") as raised:
            await create(messages=[{"role": "user", "content": "word " * 600}])
        if error is openai.BadRequestError:
            assert raised.value.code == "context_length_exceeded"
        raise raised.value

    trajectory = await play(ScriptedEngine([ANSWER]), agent)
    assert trajectory.status is Status.truncated
    assert "error" not in trajectory.metadata
    assert len(trajectory.segments) == 1


async def test_clients_do_not_try_again_what_the_engine_refused():
    async def agent(line: Any, connection: Connection) -> None:
        with pytest.raises(openai.APIStatusError, match="no memory"):
            await chat_client(connection).chat.completions.create(model="gpt", messages=line["messages"])

    engine = ScriptedEngine([EngineError("no memory"), ANSWER])
    trajectory = await play(engine, agent)
    assert (trajectory.status, trajectory.metadata["error"]) == (Status.failed, "no memory")
    assert len(engine.requests) == 1


async def test_parallel_sub_agents_are_segments_of_one_trajectory():
    def script(text: str) -> str:
        return f"{text.count('7')} sevens.<|im_end|>"

    async def sub(client: openai.AsyncOpenAI, number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"Look at {'7' * number}."}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="gpt", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "And 7?"}]
        return messages[-2].content

    async def agent(line: Any, connection: Connection) -> None:
        async with chat_client(connection) as client:
            found = await asyncio.gather(*(sub(client, number) for number in range(1, 9)))
            messages = [*line["messages"], {"role": "user", "content": " ".join(found)}]
            await client.chat.completions.create(model="gpt", messages=messages)

    engine = ScriptedEngine(script)
    trajectory = await play(engine, agent)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert len(trajectory.segments) == 9
    assert [len(set(one.turn_ids[one.loss_mask])) for one in trajectory.segments] == [3] * 8 + [1]
    assert engine.most_under_way > 1
    assert_every_sample_is_trained_once(trajectory, engine)
    assert trajectory.messages[1]["content"].count("sevens") == 8


async def test_a_client_that_disconnects_leaves_no_segment():
    async def agent(line: Any, connection: Connection) -> None:
        headers = {"authorization": f"Bearer {connection.api_key}"}
        body = {"model": "m", "messages": line["messages"]}
        async with httpx.AsyncClient(headers=headers) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{connection.openai_base_url}/chat/completions", json=body, timeout=0.3)
        await asyncio.sleep(0.1)
        await chat_client(connection).chat.completions.create(model="gpt", messages=[SYSTEM, *line["messages"]])

    engine = ScriptedEngine([30.0, ANSWER])
    trajectory = await play(engine, agent)
    assert engine.cancelled == 1
    assert len(trajectory.segments) == 1
    assert trajectory.metadata["gateway"]["abandoned"] == 1
