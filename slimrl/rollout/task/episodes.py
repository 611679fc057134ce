"""What the episodes of a recipe are run with, resolved before anything starts, and again in each episode worker."""

from dataclasses import dataclass
from typing import Any

from slimrl.agent.compaction import SummaryRule
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.episode import EpisodeLoop, Search
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.gateway.agents import Agent
from slimrl.agent.gateway.runner import GatewayRunner
from slimrl.agent.roles.player import Player, load_players
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox
from slimrl.config.load import LoadedRecipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import Engine
from slimrl.engines.continued import continued
from slimrl.engines.turn_logs import TurnLogs
from slimrl.rewards.loading import Supplies
from slimrl.rollout.task.dialogue import load_dialogues
from slimrl.rollout.task.environment import (
    check_summary_request,
    declared_roles,
    load_agent,
    load_environment,
    load_episode_loop,
    load_subagents,
    load_summary_rule,
)
from slimrl.rollout.task.search import load_search


@dataclass(frozen=True, kw_only=True)
class EpisodeCode:
    dialogues: Dialogues
    tools: ToolBox
    environment: MakeEnvironment
    roles: tuple[str, ...]
    """Those that the environment's class says it has; none if it does not say"""
    episode_loop: EpisodeLoop
    agent: Agent | None
    """Behind the gateway, instead of environment and episode loop"""
    summary_rule: SummaryRule | None
    subagents: dict[str, ToolBox]
    """Tools of each sub-agent, by the sub-agent's name"""
    players: dict[str, Player]
    """Who plays roles in place of the policy, by name"""
    search: Search | None
    """Searches the steps of each episode"""

    def episode_runner(
        self, recipe: Recipe, engine: Engine, logs: TurnLogs | None = None, past: Engine | None = None
    ) -> EpisodeRunner | GatewayRunner:
        """
        Args:
            logs: of the episodes that a checkpoint may have to hold; None if it holds none.
            past: the engines of older versions of the policy, if there are any.
        """
        engine = continued(engine, recipe, self.dialogues.chat.template.decode, logs)
        if self.agent is not None:
            return GatewayRunner(
                engine=engine,
                dialogues=self.dialogues,
                agent=self.agent,
                rollout=recipe.rollout,
                config=recipe.agent,
                one_at_a_time=recipe.deterministic,
            )
        return EpisodeRunner(
            engine=engine,
            dialogues=self.dialogues,
            environment=self.environment,
            rollout=recipe.rollout,
            agent=recipe.agent,
            episode_loop=self.episode_loop,
            tools=self.tools,
            summary_rule=self.summary_rule,
            subagents=self.subagents,
            players=self.players,
            past=past,
            search=self.search,
            parallel_subagents=not recipe.deterministic,
        )


def load_episode_code(loaded: LoadedRecipe, sandbox: SandboxPool) -> EpisodeCode:
    """
    Args:
        sandbox: for what asks for it.

    Raises:
        RecipeError: all problems at once: import paths, tools, parser, the chat template.
    """
    recipe, collector = loaded.recipe, ProblemCollector(loaded)
    dialogues, tools = collector.get("model.path", lambda: load_dialogues(loaded, sandbox)) or (None, ToolBox([]))
    agent = recipe.agent
    environment = collector.get("agent.environment", lambda: load_environment(recipe, tools, sandbox))
    values: dict[str, Any] = {
        "dialogues": dialogues,
        "tools": tools,
        "environment": environment,
        "roles": () if environment is None else declared_roles(agent, environment),
        "episode_loop": collector.get("agent.episode", lambda: load_episode_loop(agent.episode)),
        "agent": collector.get(
            "agent.command_task" if agent.command_task else "agent.function", lambda: load_agent(agent, sandbox)
        ),
        "summary_rule": collector.get(
            "agent.compaction.function", lambda: load_summary_rule(agent.compaction.function)
        ),
        "subagents": collector.get("agent.subagents", lambda: load_subagents(agent, sandbox)),
        "players": collector.get("agent.players", lambda: load_players(agent.players)),
        "search": load_search(recipe, collector.get, Supplies({SandboxPool: sandbox})),
    }
    if values["search"] is not None and (roles := values["roles"]):
        said = f"{agent.environment} has the roles {', '.join(roles)}, and a search is for one. Use off."
        collector.problems.append(loaded.problem("agent.search.method", said))
    if dialogues is not None:
        chat = dialogues.chat
        collector.get("agent.compaction", lambda: check_summary_request(agent.compaction, chat))
    if collector.problems:
        raise RecipeError(collector.problems)
    return EpisodeCode(**values)
