"""Search over the steps of an episode (slimrl/agent/tree_search)."""

from dataclasses import dataclass, field
from enum import Enum

from slimrl.config.schema.types import FiniteValue, NonNegativeFloat, NonNegativeInt, OptionalClassPath, PositiveInt


class SearchMethod(str, Enum):
    """How the states that are gone on from are chosen (docs/agents.md#search-over-steps)."""

    off = "off"
    """Each episode takes one path."""
    best_of_n = "best_of_n"
    """The best of the states after each turn."""
    beam = "beam"
    """The best `beam` states after each turn."""
    mcts = "mcts"
    """Monte-Carlo tree search: the state with the highest upper confidence bound (UCT)."""


@dataclass(kw_only=True)
class SearchValueConfig:
    function: OptionalClassPath = ""
    """Import path `module:name` of what says how good a state is, in the form of a reward (docs/rewards.md); empty for
    the recipe's own reward, which often knows the label."""
    args: dict[str, FiniteValue] = field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""


@dataclass(kw_only=True)
class SearchConfig:
    method: SearchMethod = SearchMethod.off
    """How an episode is searched."""
    width: PositiveInt = 4
    """Turns that are sampled in a state, each of which leads to another state."""
    beam: PositiveInt = 2
    """States that are kept after each turn (beam)."""
    expansions: PositiveInt = 16
    """States in which turns are sampled (mcts)."""
    exploration: NonNegativeFloat = 1.0
    """Factor on the bound's uncertainty, for values between 0 and 1 (mcts)."""
    rollouts: NonNegativeInt = 1
    """Plain episodes from each new state to the end, of whose ends the mean value is the state's; 0: the function
    judges the state as it is."""
    value: SearchValueConfig = field(default_factory=SearchValueConfig)
    """What says how good a state or an end is."""
    max_tokens: PositiveInt | None = None
    """Sampled tokens of a trajectory, those of rollouts included, from which on the search ends; null for no limit."""
