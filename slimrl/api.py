"""What tasks import: the names that tools, environments, rewards, agents, parsers, losses and advantages are made of.

These names are stable. All others of slimrl may change with any version, but for the import paths of ready-made tools,
environments and rewards, which recipes name (`slimrl.rewards.math:boxed_exact`). docs/new_task.md lists the names.
Neither torch nor ray, megatron or sglang is imported with them. Nothing in slimrl imports this module.
"""

from slimrl.agent.environment import Environment, Observation, Turn, answers
from slimrl.agent.episode import Episode
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.parsers import ParsedTurn, Parser
from slimrl.agent.sandbox.interface import Language, Program, SandboxBusy, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.agent.tools import EpisodeInfo, ToolBox, ToolError, tool
from slimrl.algorithms.advantages import Group
from slimrl.algorithms.loss_types import PolicyTokens, TokenLosses
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory, read_trajectories, write_trajectories
from slimrl.rewards.scoring import Score

__all__ = [  # noqa: RUF022 - in the order of the page, by what they are for
    # Prompts and trajectories
    "Prompt",
    "Trajectory",
    "Segment",
    "Status",
    "read_trajectories",
    "write_trajectories",
    # Tools
    "tool",
    "ToolError",
    "EpisodeInfo",
    "ToolBox",
    # Environments
    "Environment",
    "Observation",
    "Turn",
    "ToolCall",
    "MalformedCall",
    "answers",
    # Rewards
    "Score",
    # Code that the policy wrote
    "SandboxPool",
    "SandboxConfig",
    "SandboxLimits",
    "Program",
    "Language",
    "SandboxError",
    "SandboxBusy",
    # Agents behind the gateway
    "Connection",
    # Episodes of one's own
    "Episode",
    # Parsers of tool calls
    "Parser",
    "ParsedTurn",
    # Losses and advantages
    "PolicyTokens",
    "TokenLosses",
    "AlgorithmConfig",
    "Group",
]
