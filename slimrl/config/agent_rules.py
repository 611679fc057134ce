"""Rules of the episodes: what belongs to an environment, workers, compaction."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema import HistoryMode, Recipe


def agent_violations(recipe: Recipe) -> Iterator[Violation]:
    agent = recipe.agent
    if agent.environment:
        for name in ("tools", "max_tool_calls", "system_prompt"):
            if getattr(agent, name):
                yield f"agent.{name}", "the environment of agent.environment says that itself. Leave it out."
    elif agent.environment_args:
        yield "agent.environment_args", "there is no agent.environment to take them."
    if agent.workers > 1 and recipe.deterministic:
        yield (
            "agent.workers",
            f"{agent.workers}: a deterministic run forms the engines' batches from all episodes in one process. Use 1, "
            "or deterministic false.",
        )
    yield from _compaction_violations(recipe)


def _compaction_violations(recipe: Recipe) -> Iterator[Violation]:
    compaction, limit = recipe.agent.compaction, recipe.rollout.max_trajectory_tokens
    if compaction.at_tokens is None:
        if compaction.function:
            yield "agent.compaction.function", "nothing is compacted without agent.compaction.at_tokens."
        return
    if compaction.at_tokens >= limit:
        yield (
            "agent.compaction.at_tokens",
            f"{compaction.at_tokens}: a context ends at rollout.max_trajectory_tokens {limit}. Use less.",
        )
    if recipe.agent.history is not HistoryMode.keep:
        yield "agent.compaction.at_tokens", "needs agent.history keep."
