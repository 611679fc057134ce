"""Agents as people use them, each with what it needs to be told, and what a scripted policy answers it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sys.prefix) / "clients"
AGENTS = Path(__file__).parent / "agents"
PROMPT_AGENT = [str(INSTALLED / "python" / "bin" / "python"), str(ROOT / "docs" / "examples" / "prompt_agent.py")]
ANSWER = "34*17+2 = \\boxed{580}."


@dataclass(frozen=True, kw_only=True)
class Client:
    words: Sequence[str]
    package: str
    """Whose version the table has"""
    told: str
    """What it needs to be told, for the table"""
    tool: str = "calculator"
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"expression": "34*17+2"})
    turns: Sequence[str] | None = None
    """The policy's turns; None for a call of the tool and an answer"""
    result: str = "580"
    """What the last turn was told, among others"""
    env: Mapping[str, str] = field(default_factory=dict)
    aside: Sequence[str] = ()
    """Texts of the system messages of side requests, for `agent.gateway.skip`"""
    segments: int = 1

    @property
    def script(self) -> Sequence[str]:
        call = json.dumps({"name": self.tool, "arguments": self.arguments})
        return self.turns or (f"<tool_call>\n{call}\n</tool_call>", ANSWER)


def script(name: str, *words: str) -> list[str]:
    """A program of `agents`."""
    if name.endswith(".mjs"):
        return ["node", str(INSTALLED / name), *words]
    return [str(INSTALLED / "python" / "bin" / "python"), str(AGENTS / name), *words]


SHELL = "echo $((34*17+2)) > answer.txt; cat answer.txt"
CODEX = (
    "exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy "
    "-c model_provider=gateway -c model_providers.gateway.name=gateway -c model_providers.gateway.wire_api=responses "
    "-c model_providers.gateway.env_key=OPENAI_API_KEY "
    '-c "model_providers.gateway.base_url=\\"$OPENAI_BASE_URL\\"" "$0"'
)
OPENCODE = {
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {}},
        }
    },
    "model": "gateway/policy",
    "small_model": "gateway/policy",
    "autoupdate": False,
    "share": "disabled",
}

CLIENTS = {
    "qwen-code": Client(
        words=[*PROMPT_AGENT, "qwen", "-p", "PROMPT", "--yolo", "--auth-type", "openai"],
        package="@qwen-code/qwen-code",
        told="`qwen -p TASK --yolo --auth-type openai`, `OPENAI_MODEL`",
        tool="run_shell_command",
        # Of a command that ends at once it loses the output on a busy machine.
        arguments={"command": f"{SHELL}; sleep 1", "is_background": False},
        env={"OPENAI_MODEL": "policy"},
    ),
    "Claude Code": Client(
        words=[*PROMPT_AGENT, "claude", "-p", "PROMPT", "--dangerously-skip-permissions", "--model", "policy"],
        package="@anthropic-ai/claude-code",
        told="`claude -p TASK --dangerously-skip-permissions --model policy`, `IS_SANDBOX=1` for root, "
        "`CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`",
        tool="Bash",
        arguments={"command": SHELL, "description": "Computes."},
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "Codex": Client(
        words=[*PROMPT_AGENT, "sh", "-c", CODEX, "PROMPT"],
        package="@openai/codex",
        told="a provider with `wire_api = responses`, `base_url` and `env_key`",
        tool="exec_command",
        arguments={"cmd": SHELL},
    ),
    "opencode": Client(
        words=[*PROMPT_AGENT, "opencode", "run", "PROMPT"],
        package="opencode-ai",
        told="a provider of `@ai-sdk/openai-compatible` in `OPENCODE_CONFIG_CONTENT`",
        tool="bash",
        arguments={"command": SHELL, "description": "Computes."},
        env={"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE)},
        aside=["You are a title generator"],
    ),
    "openai-agents, Responses": Client(
        words=script("openai_agents.py", "responses"), package="openai-agents", told="nothing"
    ),
    "openai-agents, chat": Client(
        words=script("openai_agents.py", "chat_completions"),
        package="openai-agents",
        told="`set_default_openai_api('chat_completions')`",
    ),
    "smolagents, ToolCallingAgent": Client(
        words=script("smolagents_agent.py", "tools"),
        package="smolagents",
        told="`OpenAIServerModel` with `api_base`",
        turns=[
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "34*17+2"}}\n</tool_call>',
            '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "580"}}\n</tool_call>',
        ],
        segments=2,
    ),
    "smolagents, CodeAgent": Client(
        words=script("smolagents_agent.py", "code"),
        package="smolagents",
        told="`OpenAIServerModel` with `api_base`",
        turns=[
            'I compute.\n<code>\nprint(calculator("34*17+2"))\n</code>',
            'I answer.\n<code>\nfinal_answer("580")\n</code>',
        ],
    ),
    "pydantic-ai, text": Client(words=script("pydantic_agent.py", "text"), package="pydantic-ai-slim", told="nothing"),
    "pydantic-ai, structured": Client(
        words=script("pydantic_agent.py", "structured"),
        package="pydantic-ai-slim",
        told="nothing",
        turns=[
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "34*17+2"}}\n</tool_call>',
            '<tool_call>\n{"name": "final_result", "arguments": {"value": 580}}\n</tool_call>',
        ],
    ),
    "langchain, text": Client(words=script("langchain_agent.py", "text"), package="langchain", told="nothing"),
    "langchain, structured": Client(
        words=script("langchain_agent.py", "structured"),
        package="langchain",
        told="nothing",
        turns=[
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "34*17+2"}}\n</tool_call>',
            '<tool_call>\n{"name": "Answer", "arguments": {"value": 580}}\n</tool_call>',
        ],
    ),
    "litellm, openai/": Client(words=script("litellm_agent.py", "openai"), package="litellm", told="`api_base`"),
    "litellm, anthropic/": Client(words=script("litellm_agent.py", "anthropic"), package="litellm", told="`api_base`"),
    "mini-swe-agent": Client(
        words=[*PROMPT_AGENT, "mini", "-y", "--exit-immediately", "-m", "openai/policy", "-t", "PROMPT"],
        package="mini-swe-agent",
        told="`mini -y --exit-immediately -m openai/policy -t TASK`, `MSWEA_COST_TRACKING`, `MSWEA_CONFIGURED`",
        tool="bash",
        arguments={"command": SHELL},
        turns=[
            '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((34*17+2))"}}\n</tool_call>',
            '<tool_call>\n{"name": "bash", "arguments": {"command": '
            '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}\n</tool_call>',
        ],
        env={"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"},
    ),
    **{
        f"Vercel SDK, {provider}": Client(
            words=script("vercel_agent.mjs", provider), package=f"@ai-sdk/{package}", told=told
        )
        for provider, package, told in (
            ("compatible", "openai-compatible", "`baseURL`"),
            ("openai", "openai", "`baseURL`"),
            ("anthropic", "anthropic", "`baseURL`, with `/v1`"),
        )
    },
}
