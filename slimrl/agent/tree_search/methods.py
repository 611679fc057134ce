"""Which states a search goes on from.

- `best_of_n`: the best of the states after each turn.
- `beam`: the best few states after each turn.
- `mcts`: Monte-Carlo tree search. From the first state on, the next one has the highest upper confidence bound
  (UCT, Kocsis and Szepesvári 2006; over an agent's or a solution's steps: ReST-MCTS*, arXiv:2406.03816), down to one
  that was not gone on from.
"""

import math

from slimrl.agent.tree_search.tree import Node, Tree
from slimrl.config.schema.search import SearchConfig, SearchMethod


async def grow(tree: Tree, settings: SearchConfig) -> None:
    """Go on until all paths have ended or the budget is spent."""
    if settings.method is SearchMethod.mcts:
        await _mcts(tree, settings)
    else:
        await _beam(tree, settings.beam if settings.method is SearchMethod.beam else 1)


async def _beam(tree: Tree, size: int) -> None:
    kept = [tree.root]
    while kept and tree.has_budget:
        states = [state for state in await tree.expand(kept) if state.status is None]
        states.sort(key=lambda state: state.value, reverse=True)
        kept = states[:size]
        await tree.drop(states[size:])


async def _mcts(tree: Tree, settings: SearchConfig) -> None:
    for _ in range(settings.expansions):
        if tree.root.is_spent or not tree.has_budget:
            return
        node = tree.root
        while node.children:
            left = [child for child in node.children if not child.is_spent]
            node = max(left, key=lambda child: _bound(child, settings.exploration))
        await tree.expand([node])


def _bound(node: Node, exploration: float) -> float:
    """The upper confidence bound of a state: its value + c sqrt(ln N / n), with N and n the values that count for the
    state before it and for itself."""
    assert node.parent is not None
    return node.value + exploration * math.sqrt(math.log(node.parent.num_values) / node.num_values)
