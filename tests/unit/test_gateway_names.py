"""What a request may name instead of sending it, other paths of the same endpoints, counts of tokens, and models."""

from typing import Any

import httpx
import pytest
from gateway_agents import ANSWER, CALL, PARAMETERS, ScriptedEngine, assert_every_sample_is_trained_once, decode, play
from test_gateway import NEXT, QUESTION, Post, asked

from slimrl.agent.gateway.connection import Connection
from slimrl.data.trajectory import Status

TOOLS = [{"type": "function", "name": "calculator", "description": "Evaluate arithmetic.", "parameters": PARAMETERS}]
THOUGHT = "<think>\nhm\n</think>\n\n" + CALL


async def responded(post: Post, given: Any, **body: Any) -> dict[str, Any]:
    answer = await post("/v1/responses", input=given, tools=TOOLS, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "580<|im_end|>"}


async def whole(post: Post) -> None:
    items = [QUESTION]
    for more in ([], [], [NEXT]):
        items += more
        output = (await responded(post, items, instructions="Be brief."))["output"]
        items += [*output, *(result_of(one) for one in output if one["type"] == "function_call")]


async def by_response(post: Post) -> None:
    first = await responded(post, [QUESTION], instructions="Be brief.")
    result = result_of(first["output"][-1])
    second = await responded(post, [result], previous_response_id=first["id"], instructions="Be brief.")
    assert second["previous_response_id"] == first["id"]
    await responded(post, [NEXT], previous_response_id=second["id"], instructions="Be brief.")


async def by_item(post: Post) -> None:
    items: list[Any] = [QUESTION]
    for more in ([], [], [NEXT]):
        items += more
        for one in (await responded(post, items, instructions="Be brief."))["output"]:
            items.append({"type": "item_reference", "id": one["id"]})
            items += [result_of(one)] if one["type"] == "function_call" else []


@pytest.mark.parametrize("act", [by_response, by_item])
async def test_turns_that_a_request_names_are_those_that_the_policy_sampled(act: Any):
    """The same tokens as with whole conversations."""
    named, sent = ScriptedEngine([THOUGHT, ANSWER, ANSWER]), ScriptedEngine([THOUGHT, ANSWER, ANSWER])
    trajectory, _ = await asked(named, act)
    plain, _ = await asked(sent, whole)
    assert [one.input_ids for one in named.requests] == [one.input_ids for one in sent.requests]
    assert trajectory.messages == plain.messages
    assert len(trajectory.segments) == len(plain.segments) == 1
    assert_every_sample_is_trained_once(trajectory, named)


async def test_instructions_are_those_of_the_request():
    async def act(post: Post) -> None:
        first = await responded(post, [QUESTION], instructions="Be brief.")
        await responded(post, [NEXT], previous_response_id=first["id"])

    engine = ScriptedEngine([ANSWER, ANSWER])
    trajectory, _ = await asked(engine, act)
    assert "Be brief." not in decode(engine.requests[1].input_ids)
    assert [one["content"] for one in trajectory.messages[:3:2]] == [QUESTION["content"], NEXT["content"]]
    assert len(trajectory.segments) == 2


@pytest.mark.parametrize("given", ["resp_0", "resp_", "", "x", "_"])
async def test_what_the_trajectory_does_not_have_cannot_be_named(given: str):
    async def act(post: Post) -> None:
        first = await responded(post, [QUESTION])
        answer = await post("/v1/responses", input="x", previous_response_id=given)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
        for item in (given, first["id"], first["output"][0]["id"] + "1"):
            answer = await post("/v1/responses", input=[{"type": "item_reference", "id": item}, NEXT])
            assert answer.status_code == 400
            assert f"input[0]: this trajectory has no item {item}." in answer.json()["error"]["message"]

    await asked(ScriptedEngine([ANSWER]), act)


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_every_endpoint_is_there_with_and_without_the_version(prefix: str):
    async def act(post: Post) -> None:
        bodies = {"chat/completions": {}, "messages": {"max_tokens": 64}}
        for path, body in bodies.items():
            assert (await post(f"{prefix}/{path}", messages=[QUESTION], **body)).status_code == 200
        assert (await post(f"{prefix}/responses", input="x")).status_code == 200

    trajectory, _ = await asked(ScriptedEngine([ANSWER] * 3), act)
    assert trajectory.metadata["num_turns"] == 3


async def test_a_count_of_tokens_is_that_of_the_context_and_leaves_no_turn():
    async def act(post: Post) -> None:
        body = {"system": "Be brief.", "tools": [{"name": "calculator", "input_schema": PARAMETERS}]}
        for messages in ([QUESTION], [QUESTION, {"role": "assistant", "content": "Yes."}, NEXT]):
            counted = await post("/v1/messages/count_tokens", messages=messages, **body)
            assert counted.status_code == 200, counted.text
            answer = await post("/v1/messages", messages=messages, max_tokens=64, **body)
            counts.append((counted.json()["input_tokens"], answer.json()["usage"]["input_tokens"]))
        long = {"role": "user", "content": "word " * 5000}
        assert (await post("/v1/messages/count_tokens", messages=[long])).status_code == 400
        wrong = await post("/v1/messages/count_tokens", messages=[{"role": "x"}])
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")

    counts: list[tuple[int, int]] = []
    engine = ScriptedEngine([ANSWER, ANSWER])
    trajectory, _ = await asked(engine, act)
    assert counts == [(len(one.input_ids), len(one.input_ids)) for one in engine.requests]
    assert (trajectory.status, trajectory.metadata["num_turns"]) == (Status.completed, 2)
    assert trajectory.metadata["gateway"]["requests"] == 2


@pytest.mark.parametrize("name", ["policy", "gpt-5", "Qwen/Qwen3-8B"])
async def test_a_model_of_any_name_is_there(name: str):
    async def agent(line: Any, connection: Connection) -> None:
        headers = {"x-api-key": connection.api_key}
        async with httpx.AsyncClient(headers=headers, base_url=connection.url, trust_env=False) as client:
            for prefix in ("/v1", ""):
                model = (await client.get(f"{prefix}/models/{name}")).json()
                assert (model["id"], model["object"], model["type"]) == (name, "model", "model")
                listed = (await client.get(f"{prefix}/models")).json()
                assert ([one["id"] for one in listed["data"]], listed["has_more"]) == (["policy"], False)
            await client.post("/v1/chat/completions", json={"model": name, "messages": [QUESTION]})

    assert (await play(ScriptedEngine([ANSWER]), agent)).status is Status.completed
