"""What becomes of each field of a request; and the bodies that well-known agents send."""

import copy
import logging
from types import ModuleType
from typing import Any

import pytest
from anthropic.types import message_create_params as anthropic_params
from anthropic.types.beta import message_create_params as anthropic_beta_params
from gateway_agents import ANSWER, CALL, PARAMETERS, TOOL, ScriptedEngine, assert_every_sample_is_trained_once
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from test_gateway import CHATS, QUESTION, Post, asked

from slimrl.agent.gateway import anthropic_messages, chat_completions, responses
from slimrl.agent.gateway.errors import ApiError
from slimrl.agent.gateway.fields import ANTHROPIC_MESSAGES, CHAT_COMPLETIONS, RESPONSES, Verdict
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status

OWN = {"name": "calculator", "description": "Evaluate arithmetic."}
APIS: dict[str, tuple[ModuleType, Any, dict[str, Any]]] = {
    "chat": (chat_completions, CHAT_COMPLETIONS, {"messages": [QUESTION], "tools": [TOOL]}),
    "responses": (
        responses,
        RESPONSES,
        {"input": [QUESTION], "tools": [{"type": "function", **OWN, "parameters": PARAMETERS}]},
    ),
    "messages": (
        anthropic_messages,
        ANTHROPIC_MESSAGES,
        {"messages": [QUESTION], "max_tokens": 9, "tools": [{**OWN, "input_schema": PARAMETERS}]},
    ),
}
JUDGED = [(api, path) for api, (_, table, _) in APIS.items() for path in table if table[path].verdict != Verdict.read]


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with one more field."""
    body = copy.deepcopy({"model": "m", **body})
    *above, name = path.split(".")
    place: Any = body
    for step in above:
        place = place[step[:-2]][0] if step.endswith("[]") else place.setdefault(step, {})
    place[name] = value
    return body


@pytest.mark.parametrize(
    ("table", "params"),
    [
        (CHAT_COMPLETIONS, chat_params.CompletionCreateParamsBase),
        (RESPONSES, responses_params.ResponseCreateParamsBase),
        (ANTHROPIC_MESSAGES, anthropic_params.MessageCreateParamsBase),
        (ANTHROPIC_MESSAGES, anthropic_beta_params.MessageCreateParamsBase),
    ],
)
def test_every_field_that_the_companies_clients_send_is_judged(table: Any, params: Any):
    assert sorted(set(params.__annotations__) - set(table)) == []


@pytest.mark.parametrize(("api", "path"), JUDGED)
def test_a_field_does_what_its_verdict_says(api: str, path: str):
    module, table, body = APIS[api]
    _, plain = module.read({"model": "m", **body}, {})
    given = put(body, path, {"type": "made up"})
    if table[path].verdict is Verdict.refused:
        with pytest.raises(ApiError) as caught:
            module.read(given, {})
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        assert caught.value.message == f"{path}: {table[path].reason}"
        return
    _, request = module.read(given, {})
    assert (request.key, request.max_tokens, request.stop) == (plain.key, plain.max_tokens, plain.stop)
    assert list(request.sampling) == ([path] if table[path].verdict is Verdict.runs else [])
    assert list(request.ignored) == ([path] if table[path].verdict is Verdict.ignored else [])


@pytest.mark.parametrize("api", APIS)
def test_a_field_that_is_null_or_asks_for_nothing_is_absent(api: str):
    module, table, body = APIS[api]
    _, plain = module.read({"model": "m", **body}, {})
    for path, field in table.items():
        for value in (None, *field.asks_nothing):
            if path in ("model", *body):
                continue
            plain_form = [] if path == "thinking" and value else [value]
            for form in [*plain_form, *([{"type": value}] if isinstance(value, str) else [])]:
                _, request = module.read(put(body, path, form), {})
                assert (request.sampling, request.ignored) == ({}, {}), path
                assert request.tools == ([] if value == "none" and path == "tool_choice" else plain.tools)


@pytest.mark.parametrize("kind", ["web_search", "namespace", "mcp", "bash_20250124", "x" * 900])
def test_a_tool_of_another_kind_is_not_shown(kind: str):
    for module, _, body in APIS.values():
        _, plain = module.read({"model": "m", **body}, {})
        others = [{"type": kind, "name": "w", "tools": [{}]}, *body["tools"], {"type": kind, "max_uses": 8}]
        _, request = module.read({"model": "m", **body, "tools": others}, {})
        assert request.tools == plain.tools
        assert list(request.ignored) == [f"tools[] of type {kind}"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"messages": [QUESTION], "tool_choice": "required"}),
        (CHATS, {"messages": [QUESTION], "tool_choice": {"type": "function", "function": {"name": "calculator"}}}),
        (CHATS, {"messages": [QUESTION], "response_format": {"type": "json_schema", "json_schema": {}}}),
        ("/v1/messages", {"messages": [QUESTION], "max_tokens": 64, "tool_choice": {"type": "any"}}),
        ("/v1/messages", {"messages": [QUESTION], "max_tokens": 64, "output_config": {"format": {"type": "json"}}}),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": "function", "name": "calculator"}}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}),
    ],
)
async def test_a_forced_call_or_form_is_a_hint(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture):
    """The policy is sampled as without it: the recorded log-probs are those of its own distribution."""

    async def act(post: Post) -> None:
        assert (await post(path, **body)).status_code == 200

    engine = ScriptedEngine([ANSWER])
    trajectory, _ = await asked(engine, act)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert_every_sample_is_trained_once(trajectory, engine)
    hint = next(name for name in body if name in ("tool_choice", "response_format", "output_config", "text"))
    (said,) = [one for one in caplog.messages if "agents send" in one]
    assert said.startswith(f"agents send {hint}")
    assert "sampled freely" in said


async def test_an_unknown_field_is_warned_of_once_by_its_name(caplog: pytest.LogCaptureFixture):
    async def act(post: Post) -> None:
        for number in range(3):
            odd = {f"a\x1b[31m{number}{'b' * 90}": 1} if number else {}
            told = {**QUESTION, "content": f"{number}", "cache_hint": {"x": 1}}
            answer = await post(messages=[told], copy=1, guided_json={}, model_config=2, **odd)
            assert answer.status_code == 200, answer.text

    with caplog.at_level(logging.WARNING):
        await asked(ScriptedEngine([ANSWER] * 3), act, sampling=SamplingConfig(max_new_tokens=64))
    said = sorted(one.split()[2] for one in caplog.messages if "does not know it" in one)
    odd = [f"a\\u001b[31m{number}{'b' * 90}"[:80] for number in (1, 2)]
    assert said == [*odd, "copy", "guided_json", "messages[].cache_hint", "model_config"]


async def test_agents_cannot_fill_the_log_with_names(caplog: pytest.LogCaptureFixture):
    async def act(post: Post) -> None:
        for number in range(3):
            names = {f"field_{number}_{one}": 1 for one in range(150)}
            assert (await post(messages=[QUESTION], **names)).status_code == 200
        await post(path="/v1/none")

    await asked(ScriptedEngine([ANSWER] * 3), act)
    assert len([one for one in caplog.messages if one.startswith("agents send")]) == 200
    said = [one for one in caplog.messages if "the log names no more" in one]
    assert said == ["fields that agents send in vain: 200 were warned of; the log names no more"]
    assert any("an agent's request: POST /v1/none was refused" in one for one in caplog.messages)


CACHED = {"cache_control": {"type": "ephemeral"}}
STRICT = {"$schema": "https://json-schema.org/draft/2020-12/schema", **PARAMETERS, "additionalProperties": False}
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 64000,
    "stream": True,
    "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "You compute.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Friday."}, {"type": "text", "text": "34*17+2?"}]},
        {"role": "system", "content": "Available agent types: none."},
        {"role": "assistant", "content": [{"type": "text", "text": "I call."}, {"type": "tool_use", "id": "call_0",
            "name": "calculator", "input": {"expression": "34*17+2"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "580",
            "is_error": False, **CACHED}]},
    ],
    "tools": [{**OWN, "input_schema": STRICT}],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Brief."}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "34*17+2?"}]},
        {"type": "message", "id": "msg_3", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "id": "fc_1", "status": "completed", "name": "calculator", "call_id": "call_0",
            "arguments": '{"expression":"34*17+2"}'},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_0", "output": "580"},
    ],
    "tools": [
        {"type": "function", **OWN, "parameters": PARAMETERS, "strict": False},
        {"type": "namespace", "name": "multi_agent_v1", "description": "More.", "tools": [{"type": "function"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "client_metadata": {"session_id": "x"},
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", CLAUDE_CODE), ("/v1/responses", CODEX)])
async def test_what_coding_agents_send_is_one_segment(path: str, body: dict[str, Any]):
    """The bodies of Claude Code 2.1.197 and Codex 0.171.0, shortened."""
    name = "messages" if "messages" in body else "input"

    async def act(post: Post) -> None:
        for length in (2, len(body[name])):
            answer = await post(path, **{**body, name: body[name][:length]})
            assert answer.status_code == 200, answer.text

    engine = ScriptedEngine(["I call.\n" + CALL, ANSWER])
    trajectory, _ = await asked(engine, act)
    assert (trajectory.status, len(trajectory.segments)) == (Status.completed, 1), trajectory.metadata
    assert_every_sample_is_trained_once(trajectory, engine)
    told = {"claude-opus-4-8": ["system", "user", "system"], "policy": ["system", "user"]}[body["model"]]
    assert [one["role"] for one in trajectory.messages] == [*told, "assistant", "tool", "assistant"]
