"""What is trained of a search: each turn once, with its advantage against the other turns in the same state.

The turns of the path that was chosen are numbered first, the others in the order in which they were begun. A segment is
a context of a path; where paths share a beginning, its turns are trained in the first of their segments alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from slimrl.agent.episode import Episode
from slimrl.agent.tree_search.tree import End, Node, Tree
from slimrl.data.trajectory import SearchTree, Segment


def search_tree(tree: Tree, chosen: End) -> SearchTree:
    """
    Args:
        chosen: one of the tree's ends. Turns of a plain episode that led to it have the advantage 0, since they have no
            siblings.
    """
    unused = count()
    number_of = {node: next(unused) for node in _path(chosen.node)}
    more = [next(unused) for _ in range(chosen.episode.conversations.num_turns - chosen.node.num_turns)]
    number_of |= {node: next(unused) for node in tree.nodes if node.has_turn and node not in number_of}
    leaves = [node for node in tree.nodes if not node.children and node.episode is not chosen.episode]
    trained = set[int]()
    on_path = [number_of[node] for node in _path(chosen.node)]
    segments = list(_segments(chosen.episode, [*on_path, *more], trained))
    for leaf in leaves:
        segments += _segments(leaf.episode, [number_of[node] for node in _path(leaf)], trained)
    advantages = dict.fromkeys(more, 0.0) | {number: _advantage(node) for node, number in number_of.items()}
    return SearchTree(segments=segments, turn_advantages=[advantages[number] for number in range(len(advantages))])


def _path(node: Node) -> list[Node]:
    """The states from the first turn on up to this one, each with a turn that led to it."""
    if node.parent is None:
        return []
    return [*_path(node.parent), node] if node.has_turn else _path(node.parent)


def _advantage(node: Node) -> float:
    assert node.parent is not None
    siblings = node.parent.children
    return node.value - sum(one.value for one in siblings) / len(siblings)


def _segments(episode: Episode, numbers: Sequence[int], trained: set[int]) -> Iterator[Segment]:
    """The segments of a path that have a turn which is not trained yet.

    Args:
        numbers: of the path's turns.
        trained: numbers of the turns that are; gets those of the path.
    """
    new = np.array(sorted(set(numbers) - trained), np.int16)
    # The last entry is that of the prompt, whose turn is -1.
    renamed = np.array([*numbers, -1], np.int16)
    for segment in episode.conversations.segments:
        turns = renamed[segment.turn_ids]
        mask = segment.loss_mask & np.isin(turns, new)
        if mask.any():
            yield replace(
                segment,
                turn_ids=turns,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, segment.rollout_logprobs, 0).astype(np.float32),
                weight_versions=np.where(mask, segment.weight_versions, -1).astype(np.int32),
            )
    trained.update(numbers)
