"""Tools of MCP servers: real ones over standard input and output and over HTTP, in episodes and before them."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import wait_for_port
from own_venv import own_venv
from scripted_episode import END, call_text, played, runner_of, told
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from typer.testing import CliRunner

from slimrl.agent.mcp.server import listed_tools
from slimrl.agent.mcp.tool_box import McpToolBox
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolAnswer, ToolCrash, ToolError, ToolsUnavailable, make_tool
from slimrl.cli import app
from slimrl.config.load import load_recipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.schema.agent import AgentConfig, McpServerConfig
from slimrl.data.trajectory import Status
from slimrl.engines.servers.ports import free_port
from slimrl.rollout.task.tools import load_tools

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SERVER = str(ROOT / "tests" / "mcp_tool_server.py")
STDIO = [sys.executable, SERVER, "stdio"]
TOY = ROOT / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


def box_of(config: McpServerConfig, **agent) -> McpToolBox:
    settings = AgentConfig(mcp={"t": config}, **agent)
    return McpToolBox([], {"t": listed_tools("t", settings)}, settings)


def answers(box: McpToolBox, *calls: tuple[str, dict], timeout_s: float = 20) -> list[str | Exception]:
    """Texts, and what other calls raised."""

    async def all_of_them():
        given = []
        for name, arguments in calls:
            try:
                given.append((await box.call(name, arguments, timeout_s)).text)
            except (ToolError, ToolCrash) as error:
                given.append(error)
        return given

    return asyncio.run(all_of_them())


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def opened():
    """Opens boxes, and closes them at the end."""
    boxes = []

    def open_box(config: McpServerConfig, **agent) -> McpToolBox:
        boxes.append(box_of(config, **agent))
        boxes[-1].open()
        return boxes[-1]

    yield open_box
    for box in boxes:
        box.close()


class HttpServer:
    """The server over HTTP, which can be ended and started again at its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, SERVER, "http", str(self.port)])
        wait_for_port(self.port)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def http_server():
    server = HttpServer()
    yield server
    server.end()


def test_a_policy_calls_the_tools_and_reads_their_answers_and_errors(opened):
    box = opened(McpServerConfig(command=STDIO, env={"TOKEN_OF_TESTS": "s3cret"}))
    turns = [call_text("add", a=30, b=12), call_text("fail", why="no luck"), call_text("picture"), f"It is 42.{END}"]
    trajectory = asyncio.run(played(runner_of(*turns, tools=box)))
    assert trajectory.status is Status.completed
    said = told(trajectory, "tool")
    assert said[0] == "42"
    assert said[1].startswith("error: ")
    assert "no luck" in said[1]
    assert said[2] == "error: the tool answered with image/png; only text can be read"
    assert trajectory.metadata["tool_calls"] == {
        "add": {"calls": 1, "errors": 0, "malformed": 0},
        "fail": {"calls": 1, "errors": 1, "malformed": 0},
        "picture": {"calls": 1, "errors": 1, "malformed": 0},
    }
    weather, both, secret, wrong = answers(
        box, ("weather", {"town": "Ulm"}), ("picture", {"words": "A dot."}),
        ("environment", {"name": "TOKEN_OF_TESTS"}), ("add", {"a": "x"}),
    )  # fmt: skip
    assert json.loads(weather) == {"town": "Ulm", "degrees": 21.5}
    assert both == "A dot.\n(image/png left out; only text can be read)"
    assert secret == '"s3cret"'
    assert isinstance(wrong, ToolError)


def test_schemas_are_the_servers_own():
    box = box_of(McpServerConfig(command=STDIO, tools=["add"]))
    schema = next(one for one in box.schemas if one["function"]["name"] == "add")["function"]
    assert schema["description"].startswith("Add two numbers.")
    assert schema["parameters"]["required"] == ["a", "b"]
    assert {name: one["type"] for name, one in schema["parameters"]["properties"].items()} == dict.fromkeys(
        "ab", "integer"
    )


def test_a_server_that_ends_fails_the_call_and_is_started_again_for_the_next_one(opened):
    box = opened(McpServerConfig(command=STDIO))
    before, died, after = answers(box, ("pid", {}), ("die", {}), ("pid", {}))
    assert isinstance(died, ToolCrash)
    assert "MCP server t ended" in str(died)
    assert before != after
    assert not is_running(before)
    assert is_running(after)
    box.close()
    assert not is_running(after)


def test_a_call_is_repeated_only_if_the_tool_is_pure(opened, tmp_path):
    script = (
        "import os, pathlib, sys; from mcp.server.fastmcp import FastMCP; server = FastMCP('x')\n"
        f"seen = pathlib.Path({str(tmp_path)!r})\n"
        "@server.tool()\ndef once(name: str) -> str:\n"
        "    if not (seen / name).exists(): (seen / name).touch(); os._exit(1)\n"
        "    return 'there'\n"
        "server.run()"
    )
    command = [sys.executable, "-c", script]
    (failed,) = answers(opened(McpServerConfig(command=command)), ("once", {"name": "a"}))
    assert isinstance(failed, ToolCrash)
    box = opened(McpServerConfig(command=command, pure=["once"]))
    assert answers(box, ("once", {"name": "b"})) == ["there"]

    async def again() -> ToolAnswer:
        return await box.call("once", {"name": "b"}, 5)

    assert asyncio.run(again()) == ToolAnswer(text="there", from_cache=True)
    (given_up,) = answers(opened(McpServerConfig(command=command, pure=["once"], restarts=0)), ("once", {"name": "c"}))
    assert isinstance(given_up, ToolCrash)


def test_a_call_that_is_late_is_answered_with_an_error_and_the_next_one_well(opened):
    box = opened(McpServerConfig(command=STDIO))
    late, after = answers(box, ("sleep", {"seconds": 60}), ("add", {"a": 1, "b": 1}), timeout_s=3)
    assert "gave no answer within 3 s" in str(late)
    assert after == "2"


def test_a_start_that_takes_longer_than_a_call_may_is_not_begun_anew_by_each_call(opened):
    slow = (
        "import runpy, sys, time; time.sleep(1); sys.argv = ['x', 'stdio']; "
        f"runpy.run_path({SERVER!r}, run_name='__main__')"
    )
    box = opened(McpServerConfig(command=[sys.executable, "-c", slow]))
    answers(box, ("die", {}))
    deadline = time.monotonic() + 60
    while isinstance(answer := answers(box, ("add", {"a": 1, "b": 1}), timeout_s=0.5)[0], ToolError):
        assert time.monotonic() < deadline
    assert answer == "2"


@pytest.mark.parametrize("per_trajectory", [False, True])
def test_a_server_is_shared_by_all_episodes_or_belongs_to_one(opened, per_trajectory):
    box = opened(McpServerConfig(command=STDIO, per_trajectory=per_trajectory))

    async def episodes():
        turns = [call_text("count"), call_text("count"), call_text("pid"), f"Done.{END}"]
        return [await played(runner_of(*turns, tools=box)) for _ in range(2)]

    said = [told(trajectory, "tool") for trajectory in asyncio.run(episodes())]
    (first, second), pids = [one[:2] for one in said], [one[2] for one in said]
    assert first == ["1", "2"]
    assert second == (["1", "2"] if per_trajectory else ["3", "4"])
    assert (pids[0] == pids[1]) is not per_trajectory
    assert any(map(is_running, pids)) is not per_trajectory


def test_a_trajectory_whose_own_server_does_not_start_fails_with_the_cause(opened):
    box = opened(McpServerConfig(command=STDIO, per_trajectory=True))
    box._agent.mcp["t"].command = [sys.executable, "-c", "import sys; sys.exit('no licence')"]
    trajectory = asyncio.run(played(runner_of(f"Hm.{END}", tools=box)))
    assert trajectory.status is Status.failed
    assert "MCP server t did not start" in trajectory.metadata["error"]
    assert "no licence" in trajectory.metadata["error"]
    assert trajectory.metadata["environment"]["start_retries"] == 2


def test_over_http_with_headers_through_a_restart_of_the_server(http_server, opened):
    wrong = AgentConfig(mcp={"t": McpServerConfig(url=http_server.url + "/more")})
    with pytest.raises(ToolsUnavailable, match="did not start: the URL answers 404, not found"):
        listed_tools("t", wrong)
    box = opened(McpServerConfig(url=http_server.url, headers={"X-Key": "s3cret"}))
    assert answers(box, ("add", {"a": 2, "b": 3}), ("environment", {"name": "x-key"}), ("count", {})) == [
        "5", '"s3cret"', "1",
    ]  # fmt: skip
    http_server.end()
    (down,) = answers(box, ("count", {}))
    assert isinstance(down, ToolCrash)
    assert "MCP server t" in str(down)
    http_server.start()
    assert answers(box, ("count", {}), ("count", {})) == ["1", "2"]
    # The server is new, and the connection does not know it yet.
    http_server.end()
    http_server.start()
    assert answers(box, ("count", {})) == ["1"]


def test_names_that_clash_get_the_servers_name_before_them():
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Two.
        """
        return a - b

    agent = AgentConfig(mcp={name: McpServerConfig(command=STDIO, tools=[]) for name in ("t", "u")})
    tools = [tool for tool in listed_tools("t", agent) if tool.name in ("add", "pid")]
    box = McpToolBox([make_tool(add)], {"t": tools, "u": tools[:1]}, agent)
    assert [schema["function"]["name"] for schema in box.schemas] == ["add", "t_add", "pid", "u_add"]
    box.open()
    try:
        assert answers(box, *((name, {"a": 5, "b": 2}) for name in ("add", "t_add", "u_add"))) == ["3", "7", "7"]
    finally:
        box.close()


def problems_of(**servers: McpServerConfig) -> dict[str, str]:
    loaded = load_recipe(TOY, ["model.path=absent", "agent.tools=[]"], "train")
    collector = ProblemCollector(loaded)
    agent = AgentConfig(mcp=servers, start_timeout_s=20)
    assert load_tools(agent, collector, SandboxPool(agent.sandbox)) is None
    return {problem.key: problem.message for problem in collector.problems}


def test_servers_that_do_not_serve_are_named_before_the_start():
    no_tools = "from mcp.server.fastmcp import FastMCP; FastMCP('x').run()"
    found = problems_of(
        absent=McpServerConfig(command=["no_such_program"]),
        dies=McpServerConfig(command=[sys.executable, "-c", "import sys; sys.exit('KEY is not set')"]),
        down=McpServerConfig(url="http://127.0.0.1:9/mcp"),
        empty=McpServerConfig(command=[sys.executable, "-c", no_tools]),
        other=McpServerConfig(command=STDIO, tools=["ad"]),
    )
    assert "No such file or directory: 'no_such_program'" in found["agent.mcp.absent"]
    assert "It wrote: KEY is not set" in found["agent.mcp.dies"]
    assert "All connection attempts failed" in found["agent.mcp.down"]
    assert found["agent.mcp.empty"] == "the server lists no tools"
    assert "the server has no tool ad. Did you mean add?" in found["agent.mcp.other"]


def test_one_that_hangs_is_ended_at_the_deadline():
    agent = AgentConfig(mcp={"t": McpServerConfig(command=["sleep", "1234.5"])}, start_timeout_s=0.5)
    with pytest.raises(ToolsUnavailable, match=r"listed no tools within 0\.5 s"):
        listed_tools("t", agent)
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.parent.is_dir()]
    assert not any(b"1234.5" in command for command in commands)


def test_two_tools_of_one_name_are_refused():
    agent = AgentConfig(mcp={"t": McpServerConfig(command=STDIO)})
    (tool,) = [tool for tool in listed_tools("t", agent) if tool.name == "add"]
    with pytest.raises(ValueError, match="two tools have one name"):
        McpToolBox([], {"t": [tool, tool]}, agent)


@pytest.mark.parametrize("per_trajectory", ["true", "false"])
def test_inspect_chat_shows_the_tools_of_a_server(tmp_path, per_trajectory):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "eos_token_id": tokenizer.eos_token_id})
    )
    server = f"{{command: {json.dumps(STDIO)}, tools: [weather], per_trajectory: {per_trajectory}}}"
    arguments = [f"model.path={tmp_path}", "agent.tools=[]", f"agent.mcp.t={server}", "--json"]
    result = CliRunner().invoke(app, ["inspect-chat", str(TOY), *arguments])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)["tokens"]
    prompt = "".join(token["text"] for token in shown if token["source"] == "prompt")
    assert '"name": "weather"' in prompt
    assert "Say the weather." in prompt
    assert '"add"' not in prompt


@pytest.mark.full
def test_a_published_server_of_python(tmp_path, opened):
    """mcp-server-time of PyPI, in an environment of its own."""
    python = own_venv(tmp_path, "mcp-server-time==2026.10.19")
    box = opened(McpServerConfig(command=[python, "-m", "mcp_server_time"]))
    (text,) = answers(
        box, ("convert_time", {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"})
    )
    assert "T08:30:00+05:30" in json.loads(text)["target"]["datetime"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("npx") is None, reason="Node.js is not installed")
@pytest.mark.parametrize("transport", ["stdio", "streamableHttp"])
def test_a_published_server_of_node(tmp_path, opened, transport):
    """@modelcontextprotocol/server-everything of npm."""
    package = "@modelcontextprotocol/server-everything@2026.8.31"
    subprocess.run(["npm", "install", "--silent", "--prefix", str(tmp_path), package], check=True, timeout=240)
    command = [str(tmp_path / "node_modules" / ".bin" / "mcp-server-everything"), transport]
    if transport == "stdio":
        check_everything(opened(McpServerConfig(command=command)))
        return
    port = free_port()
    process = subprocess.Popen(command, env=os.environ | {"PORT": str(port)})
    try:
        wait_for_port(port)
        check_everything(opened(McpServerConfig(url=f"http://127.0.0.1:{port}/mcp")))
    finally:
        process.kill()
        process.wait()


def check_everything(box: McpToolBox) -> None:
    names = [schema["function"]["name"] for schema in box.schemas]
    echo, total, image = answers(
        box, ("echo", {"message": "hello"}), ("get-sum", {"a": 2, "b": 40}), ("get-tiny-image", {})
    )
    assert {"echo", "get-sum", "get-tiny-image"} <= set(names)
    assert echo == "Echo: hello"
    assert "42" in total
    assert "(image/png left out; only text can be read)" in image
