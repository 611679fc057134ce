"""What the policy acts in, and what it is shown."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from annotated_types import Ge

from slimrl.config.schema.search import SearchConfig
from slimrl.config.schema.types import (
    MISSING,
    FiniteValue,
    Flag,
    ImportPath,
    NonNegativeInt,
    OptionalClassPath,
    OptionalImportPath,
    PositiveFloat,
    PositiveInt,
    Strict,
)


class HistoryMode(str, Enum):
    """What the policy is shown of its earlier turns."""

    keep = "keep"
    """The tokens that it sampled, thinking included."""
    template = "template"
    """What the chat template writes of them, which may leave thinking out; where it does, a new segment begins."""


class IsolationMode(str, Enum):
    """Where each instance of an environment runs (docs/environments.md#isolation)."""

    loop = "loop"
    """In the event loop of the episodes, which it must not block."""
    thread = "thread"
    """In a thread of its own."""
    process = "process"
    """In a process of its own, forked from one that has imported the class."""
    venv = "venv"
    """In such a process with the interpreter of `agent.environment_venv`."""


IN_PROCESS = (IsolationMode.loop, IsolationMode.thread)
"""Where an environment is an object of slimrl's own process"""


class SandboxBackend(str, Enum):
    """Backends that run the code which the policy wrote; docs/gateway.md#sandbox compares them."""

    bubblewrap = "bubblewrap"
    """Namespaces, seccomp and limits on this machine, forked from a warm interpreter."""
    subprocess = "subprocess"
    """A plain process with limits: no isolation."""
    remote = "remote"
    """A server with the HTTP interface of SandboxFusion."""
    container = "container"
    """docker or podman, a container for each run or session."""


@dataclass(kw_only=True)
class McpServerConfig:
    """A server of tools that speaks the Model Context Protocol (docs/agents.md#mcp-servers): the settings of
    `agent.mcp.NAME`."""

    command: list[str] = field(default_factory=list)
    """Command that starts the server, which talks over its standard input and output."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command, which gets PATH, HOME and the like besides."""
    url: str = ""
    """URL of a server over streamable HTTP, instead of a command."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers of each request to the URL."""
    tools: list[str] = field(default_factory=list)
    """The server's tools that the model is shown; empty for all."""
    pure: list[str] = field(default_factory=list)
    """Names of its pure tools, whose answers follow from their arguments alone: answers are given again, and calls are
    repeated that a server which ended may have taken."""
    per_trajectory: Flag = False
    """A connection, and so a process of a command, for each trajectory, for a server that keeps state."""
    restarts: NonNegativeInt = 2
    """How often a call connects anew to a server that has ended."""


@dataclass(kw_only=True)
class SandboxLimits:
    """Limits of a run. docs/gateway.md#sandbox says how each backend enforces them."""

    wall_s: PositiveFloat = 8.0
    """Deadline of a run, or of one execution in a session. Below `rollout.tool_timeout_s`, so that a tool answers."""
    cpu_s: PositiveInt = 8
    """Limit of the CPU time of each process; whole seconds."""
    memory_bytes: PositiveInt = 512 * 1024**2
    """What a run may take of the host's memory, with its files in /tmp, its sockets and all else, in all processes."""
    processes: PositiveInt = 32
    """Most processes and threads at the same time."""
    disk_bytes: PositiveInt = 64 * 1024**2
    """Size of /tmp and /dev/shm together, and of the largest file."""
    output_bytes: PositiveInt = 256 * 1024
    """Limit of stdout and stderr together."""


@dataclass(kw_only=True)
class SandboxConfig:
    """The sandbox that runs code, and how many runs it takes at a time (docs/gateway.md#sandbox)."""

    backend: SandboxBackend = SandboxBackend.bubblewrap
    """Backend that runs the code; slimrl never falls back from one to another."""
    all_nodes: Flag = False
    """Run on all nodes of the Ray cluster, each with these limits and places, instead of the driver's alone."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    session_cpu_s: PositiveInt = 60
    """CPU time of each process of a session, over the session's life: in place of `limits.cpu_s`."""
    max_running: PositiveInt = 8
    """Most runs at the same time; others wait."""
    max_waiting: PositiveInt = 1024
    """Most runs that wait; one more is refused."""
    wait_s: PositiveFloat = 60.0
    """How long a run waits before it is refused."""
    max_sessions: PositiveInt = 64
    """Most sessions that are open at the same time; others wait, as runs do."""
    packages: list[str] = field(default_factory=lambda: ["numpy", "sympy"])
    """Distributions that the warm interpreter of `bubblewrap` imports before its runs, as far as they are installed."""
    url: str = "http://127.0.0.1:8080"
    """URL of the server of the `remote` backend."""
    command: str = "docker"
    """Command line program of the `container` backend: docker, podman or a path."""
    image: str = "python:3.12-slim"
    """Image of the `container` backend; it holds python3, sh, bash and, for sessions in a folder, tar."""


@dataclass(kw_only=True)
class CompactionConfig:
    at_tokens: PositiveInt | None = None
    """Length from which on a context is compacted: a summary takes the place of its turns
    (docs/agents.md#long-contexts). Null for never."""
    keep_turns: NonNegativeInt = 1
    """Newest turns that are kept after the summary, with what they led to, where they fit."""
    prompt: str = (
        "The conversation has become too long. Write a summary that takes its place: what the task is, what was done "
        "and found so far, and what is left to do."
    )
    """What asks the policy for the summary, which it is trained on."""
    function: OptionalImportPath = ""
    """Import path `module:function` of a function of the messages that writes the summary instead of the policy."""


@dataclass(kw_only=True)
class SubagentConfig:
    description: str = MISSING
    """Description of the sub-agent that the policy reads."""
    system_prompt: str | None = None
    """System message of the sub-agent's context."""
    tools: list[ImportPath] = field(default_factory=list)
    """Import paths `module:function` of the sub-agent's tools."""
    max_turns: PositiveInt = 4
    """Most turns of one call of the sub-agent; they count in `rollout.max_turns`."""


POLICY = "policy"
"""Stands for the model that is trained, as a role's player"""
PAST = "past"
"""Stands for an older version of it"""


class VersionChoice(str, Enum):
    """How the older version of a step is drawn (docs/agents.md#older-versions-as-players)."""

    recency = "recency"
    """The newest is likeliest: weights 1, 1/2, 1/3, and so on."""
    win_rate = "win_rate"
    """Those against which the policy does worst are likeliest: weight (1 - p)^2 with a win rate of p."""
    uniform = "uniform"
    """All are equally likely."""


@dataclass(kw_only=True)
class PastVersionsConfig:
    """Older versions of the policy, which play roles by the name `past` (docs/agents.md#older-versions-as-players)."""

    every_steps: NonNegativeInt = 0
    """Steps between two versions that are kept; 0 for no older versions and no engines for them."""
    keep: Annotated[int, Strict(), Ge(2)] = 8
    """Most versions to draw from: the first, which is the start, and the newest ones."""
    choice: VersionChoice = VersionChoice.recency
    """How the version of a step is drawn."""
    num_engines: PositiveInt = 1
    """Engines that play them, each like one of the rollout, on devices of their own."""


@dataclass(kw_only=True)
class PlayerConfig:
    """Who plays roles in place of the policy: the settings of `agent.players.NAME` (docs/agents.md#several-roles)."""

    function: ImportPath = MISSING
    """Import path `module:function` of a function of (messages, tools, seed) that says the next turn, or of a class
    whose objects do."""
    args: dict[str, FiniteValue] = field(default_factory=dict)
    """Keyword arguments of the class, which is made once."""


@dataclass(kw_only=True)
class RoleConfig:
    """A role of an environment of several: the settings of `agent.roles.NAME`."""

    player: str = POLICY
    """Who plays it: `policy`, `past`, or one of `agent.players`. A prompt's metadata may say otherwise."""
    train: Flag = True
    """Whether the policy is trained on what it says in this role."""


@dataclass(kw_only=True)
class CommandSandboxConfig:
    """bubblewrap around `agent.command` (docs/gateway.md)."""

    enabled: Flag = False
    """Run the command in namespaces of its own, where it sees its workspace and the system's programs alone."""
    paths: list[str] = field(default_factory=list)
    """Files and folders of the machine that the command sees besides, read-only, such as a virtual environment."""
    network: Flag = False
    """Whether the command has the machine's network; otherwise it reaches the gateway alone."""


@dataclass(kw_only=True)
class SkipConfig:
    """Side requests of agents, such as for a conversation's title: those named here are answered, and not trained."""

    models: list[str] = field(default_factory=list)
    """Names of models by which side requests are known."""
    system: list[str] = field(default_factory=list)
    """Texts, any of which a request's system messages hold."""


@dataclass(kw_only=True)
class GatewayConfig:
    """The server through which `agent.command` and `agent.function` reach the policy (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on, at a free port; part of the URLs that agents get."""
    max_body_bytes: PositiveInt = 33_554_432
    """Largest body of a request, in bytes."""
    body_timeout_s: PositiveFloat = 30.0
    """Deadline for the body of a request to arrive."""
    max_concurrent_requests: PositiveInt = 64
    """Most requests of a trajectory that are under way at the same time; further ones are refused with 429."""
    max_requests_per_s: PositiveFloat = 100.0
    """Most requests of a trajectory in a second, on average; as many may come at once."""
    max_refused: PositiveInt = 8
    """Most requests of a trajectory that may be refused as wrong; one more fails it."""
    skip: SkipConfig = field(default_factory=SkipConfig)
    """Side requests that are left out of training."""


@dataclass(kw_only=True)
class AgentConfig:
    tools: list[ImportPath] = field(default_factory=list)
    """Import paths `module:function` of the model's tools; annotations and docstrings become their schemas."""
    tool_args: dict[str, FiniteValue] = field(default_factory=dict)
    """Arguments of tools by name, such as `{corpus: wiki.jsonl}`. The model is not shown these parameters."""
    mcp: dict[str, McpServerConfig] = field(default_factory=dict)
    """Servers of further tools by name (docs/agents.md#mcp-servers)."""
    max_tool_calls: PositiveInt | None = None
    """Most calls of a trajectory that tools answer; further ones are answered with an error message."""
    subagents: dict[str, SubagentConfig] = field(default_factory=dict)
    """Tools that are the policy itself with a task, a context and tools of its own (docs/agents.md#sub-agents)."""
    environment: OptionalClassPath = ""
    """Import path `module:Class` of the environment, instead of tools (docs/agents.md#environments)."""
    environment_args: dict[str, FiniteValue] = field(default_factory=dict)
    """Keyword arguments of each instance of the environment."""
    environment_isolation: IsolationMode = IsolationMode.loop
    """Where each instance of the environment runs (docs/environments.md#isolation)."""
    environment_venv: str = ""
    """Virtual environment of isolation `venv`: a name that `slimrl-tools environment list` shows, or a folder."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Roles of an environment of several whose settings differ from RoleConfig's (docs/agents.md#several-roles)."""
    players: dict[str, PlayerConfig] = field(default_factory=dict)
    """Who plays roles in place of the policy, by name."""
    past_versions: PastVersionsConfig = field(default_factory=PastVersionsConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    """Search over the steps of an episode (docs/agents.md#search-over-steps)."""
    workers: PositiveInt = 1
    """Processes that run the episodes; 1 for the driver itself (docs/agents.md#several-processes)."""
    start_timeout_s: PositiveFloat = 120.0
    """Deadline of an environment's start."""
    start_retries: NonNegativeInt = 2
    """Further attempts to start an environment, each with a new instance."""
    step_timeout_s: PositiveFloat = 120.0
    """Deadline of an environment's answer to a turn."""
    close_timeout_s: PositiveFloat = 30.0
    """Deadline of an environment's close, after which it is left behind."""
    episode: OptionalImportPath = ""
    """Import path `module:function` of a function that runs an episode, in place of the loop of turns and observations
    (docs/agents.md#an-episode-of-ones-own)."""
    command: Any = ""
    """Command that is run for each trajectory and asks the policy through the gateway (docs/gateway.md): a list of
    words, or one text that is split into words as a shell does. No shell runs it."""
    command_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command besides those that docs/gateway.md lists; nothing else is inherited."""
    command_sandbox: CommandSandboxConfig = field(default_factory=CommandSandboxConfig)
    """A sandbox around the command."""
    command_task: OptionalClassPath = ""
    """Import path `module:Class` of what fills the command's folder and rewards what the command leaves there
    (docs/gateway.md#a-task-of-files)."""
    command_task_args: dict[str, FiniteValue] = field(default_factory=dict)
    """Keyword arguments of each instance of that class."""
    max_commands: PositiveInt = 64
    """Commands that run at the same time; further trajectories wait before they begin."""
    function: OptionalImportPath = ""
    """Import path `module:function` of a function that is called for each trajectory instead of a command."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    parser: str = ""
    """Format of tool calls: a parser of SGLang by its name there (`qwen25`, `deepseekv31`, `glm45`, `kimi_k2`),
    `harmony`, or the import path `module:name` of a function or class that returns a `Parser` (slimrl.api); empty for
    the one of the model's family that reads what the chat template writes. docs/chat.md has a table."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Tokens that end a turn; null for the model's: `eos_token_id` of generation_config.json, else of config.json, else
    the tokenizer's."""
    chat_template_kwargs: dict[str, FiniteValue] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking` or `reasoning_effort`."""
    tool_prompt: str = ""
    """What tells the policy its tools in the system message, where the chat template does not: `deepseek_v31`,
    `deepseek_v32` or `deepseek_v3`, as DeepSeek publishes it, or a text with `{tools}` where the schemas go, one a
    line; see docs/chat.md."""
    history: HistoryMode = HistoryMode.keep
    """What the policy is shown of its earlier turns."""
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    max_result_chars: Annotated[int, Strict(), Ge(16)] = 4000
    """Maximum length of a tool result; a longer one loses its middle."""
    system_prompt: str | None = None
    """System message of prompts without one."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    @property
    def uses_gateway(self) -> bool:
        return bool(self.command or self.function)

    @property
    def player_names(self) -> tuple[str, ...]:
        """The names that a role may have as its player."""
        return (POLICY, *([PAST] if self.past_versions.every_steps else []), *self.players)
