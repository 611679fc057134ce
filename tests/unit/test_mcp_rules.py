"""The section `agent.mcp`, before anything starts; the text of a tool's answer; and calls that meet a lost server."""

import asyncio
import importlib.util
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from mcp import ClientSession, McpError
from mcp.shared.memory import create_client_server_memory_streams
from mcp.types import (
    CONNECTION_CLOSED,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ErrorData,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from recipe_problems import recipe_problems

from slimrl.agent.mcp import connection
from slimrl.agent.mcp.result_text import result_text
from slimrl.agent.tools import ToolError
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.agent import McpServerConfig
from slimrl.config.show import resolved_dict

TOY = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
TIME = "agent.mcp.time={command: [mcp-server-time], env: {ZONE: UTC}, tools: [a, b], pure: [a]}"


def loaded(*overrides: str):
    return load_recipe(TOY, ["model.path=absent", *overrides], "train")


def problems(*overrides: str) -> dict[str, str]:
    found = recipe_problems(TOY, ["model.path=absent", *overrides])
    return {one.key: one.message for one in found if one.key.startswith("agent.")}


def test_a_server_of_each_kind_is_accepted():
    assert problems(TIME, "agent.mcp.web={url: 'https://example.org/mcp', headers: {X-Key: abc}, restarts: 0}") == {}


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("agent.mcp.a={env: {A: b}}", "agent.mcp.a", "needs either command or url"),
        ("agent.mcp.a={command: [x], url: 'http://b'}", "agent.mcp.a", "needs either command or url"),
        ("agent.mcp.a={url: 'example.org'}", "agent.mcp.a.url", "does not begin with http:// or https://"),
        ("agent.mcp.a={url: 'http://b', env: {A: b}}", "agent.mcp.a.env", "has no effect on a server by URL"),
        ("agent.mcp.a={command: [x], headers: {A: b}}", "agent.mcp.a.headers", "a command has none"),
        ("agent.mcp.a={command: [x], tools: [b], pure: [c]}", "agent.mcp.a.pure", "c is not among the tools"),
        ("agent.mcp.a={command: [x], restarts: -1}", "agent.mcp.a.restarts", "must be at least 0"),
    ],
)
def test_what_no_server_can_be_is_named(override, key, said):
    assert said in problems(override)[key]


def test_an_environment_of_ones_own_has_no_servers():
    found = problems(TIME, "agent.tools=[]", "agent.environment=slimrl.agent.tool_environment:ToolEnvironment")
    assert "agent.environment says that itself" in found["agent.mcp"]


def test_an_unknown_key_of_a_server_is_named():
    with pytest.raises(
        RecipeError, match=r"agent\.mcp\.a\.comand: no such key\. Did you mean agent\.mcp\.a\.command\?"
    ):
        loaded("agent.mcp.a.comand=[x]")


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else find(name))
    assert "pip install -c requirements/lock.txt -e '.[mcp]'" in problems(TIME)["agent.mcp"]


def test_secrets_come_from_the_environment_and_are_written_down_nowhere(monkeypatch):
    monkeypatch.setenv("MCP_KEY", "very-secret-value")
    server = "agent.mcp.web={url: 'https://example.org/mcp', headers: {Authorization: 'Bearer ${oc.env:MCP_KEY}'}}"
    found = loaded(server)
    assert found.recipe.agent.mcp["web"].headers == {"Authorization": "Bearer very-secret-value"}
    written = str(resolved_dict(found))
    assert "very-secret-value" not in written
    assert "${oc.env:MCP_KEY}" in written


def test_the_text_of_an_answer():
    text = TextContent(type="text", text="one")
    page = TextResourceContents(uri="file:///a", text="two")
    blob = BlobResourceContents(uri="file:///b", blob="AAAA", mimeType="application/pdf")
    sound = AudioContent(type="audio", data="AAAA", mimeType="audio/wav")
    resources = [EmbeddedResource(type="resource", resource=one) for one in (page, blob)]
    link = ResourceLink(type="resource_link", uri="https://example.org/x", name="x")
    assert result_text(CallToolResult(content=[text, *resources, link, sound])) == (
        "one\ntwo\nx: https://example.org/x\n(application/pdf left out; only text can be read)\n"
        "(audio/wav left out; only text can be read)"
    )
    assert result_text(CallToolResult(content=[], structuredContent={"ü": 1})) == '{"ü": 1}'
    assert result_text(CallToolResult(content=[])) == ""
    with pytest.raises(ToolError, match=r"answered with audio/wav; only text can be read"):
        result_text(CallToolResult(content=[sound]))
    with pytest.raises(ToolError, match=r"^one$"):
        result_text(CallToolResult(content=[text], isError=True))


@pytest.mark.parametrize(("code", "taken"), [(CONNECTION_CLOSED, True), (connection.SESSION_TERMINATED, False)])
async def test_a_server_may_have_taken_a_call_during_which_it_ended_and_none_of_an_unknown_session(
    code, taken, monkeypatch
):
    class Lost(ClientSession):
        async def initialize(self):
            pass

        async def list_tools(self):
            return ListToolsResult(tools=[])

        async def call_tool(self, tool, arguments):
            raise McpError(ErrorData(code=code, message="gone"))

    @asynccontextmanager
    async def streams(*_):
        async with create_client_server_memory_streams() as (client, _):
            yield client

    monkeypatch.setattr(connection, "ClientSession", Lost)
    monkeypatch.setattr(connection, "stdio_client", streams)
    opened = connection.Connection("mine", McpServerConfig(command=["x"]))
    try:
        await opened.open(10.0)
        with pytest.raises(connection.ConnectionLost, match="MCP server mine ended") as lost:
            await opened.call("tool", {})
    finally:
        await opened.close(10.0)
    assert lost.value.taken is taken


async def test_a_connection_that_ignores_its_end_is_left_behind(caplog, monkeypatch):
    may_end = asyncio.Event()

    @asynccontextmanager
    async def streams(*_):
        try:
            async with create_client_server_memory_streams() as (client, _):
                yield client
        finally:
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()

    monkeypatch.setattr(connection, "stdio_client", streams)
    monkeypatch.setattr(connection, "END_S", 0.05)
    opened = connection.Connection("mine", McpServerConfig(command=["x"]))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(2.0, may_end.set)
    await opened.close(0)
    assert not may_end.is_set()
    assert caplog.messages == ["MCP server mine: its connection does not end within 0.05 s and is left behind"]
    may_end.set()
