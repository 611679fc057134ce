"""Rules of the section `agent.search`."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.search import SearchMethod

ONE_PATH = ("episode", "command", "function", "subagents", "players", "roles")
"""Settings of `agent` with which an episode cannot be gone on from in several ways"""


def most_environments(recipe: Recipe) -> int:
    """How many environments a trajectory has open at once, at most: 1 without a search.

    While turns are tried in some states, these are open, the states that the turns lead to, and the plain episodes from
    there; a deterministic run has one such episode at a time. `mcts` also keeps the states from which it has not gone
    on.
    """
    search = recipe.agent.search
    if search.method is SearchMethod.off:
        return 1
    earlier, tried_in = 0, 1
    if search.method is SearchMethod.beam:
        tried_in = search.beam if search.width > 1 else 1
    elif search.method is SearchMethod.mcts:
        earlier = (search.expansions - 1) * (search.width - 1)
    states = tried_in * search.width
    episodes = min(search.rollouts, 1) if recipe.deterministic else states * search.rollouts
    return earlier + tried_in + states + episodes


def search_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """What a search cannot be combined with, and training on less than a search sees."""
    search = recipe.agent.search
    if search.value.args and not search.value.function:
        yield "agent.search.value.args", "there is no agent.search.value.function to take them."
    if search.method is SearchMethod.off:
        return
    for name in ONE_PATH:
        if getattr(recipe.agent, name):
            yield (
                f"agent.{name}",
                f"agent.search.method {search.method.value} cannot branch such an episode. Leave it out.",
            )
    if recipe.agent.past_versions.every_steps:
        yield "agent.past_versions.every_steps", "older versions play roles, and a search is for one role. Use 0."
    if command == "train" and not recipe.algorithm.given_by_turn:
        yield (
            "agent.search.method",
            f"{search.method.value}: training takes the advantages of a search's turns, not the best path as if it had "
            "been sampled. Set algorithm.advantage given and algorithm.credit.name turn.",
        )
