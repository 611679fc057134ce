"""Who is said to be bad where nodes do not come through together."""

import itertools
from collections import Counter

from slimrl.launch.pairs import PAIRINGS, pairings, split_nodes


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


def test_each_two_nodes_face_each_other_once_and_none_faces_itself():
    for count in range(1, 9):
        nodes = names(count)
        met = Counter(frozenset(pair) for pairs in pairings(nodes) for pair in pairs)
        assert met == Counter(frozenset(pair) for pair in itertools.combinations(nodes, 2))
        for pairs in pairings(nodes):
            assert len({node for pair in pairs for node in pair}) == 2 * len(pairs) == count - count % 2


def test_whoever_is_bad_is_found_and_nobody_else():
    for count in range(2, 9):
        nodes = names(count)
        for number in range(count + 1):
            for bad in map(set, itertools.combinations(nodes, number)):
                rounds = 0

                def run(pairs, bad=bad):
                    nonlocal rounds
                    rounds += 1
                    return {pair for pair in pairs if not bad & set(pair)}

                proven, found = split_nodes(nodes, run)
                if proven:
                    assert proven == [node for node in nodes if node not in bad]
                    assert list(found) == [node for node in nodes if node in bad]
                    assert not bad & set(found.values())
                else:
                    assert found == {}
                    assert rounds <= PAIRINGS
                # A pair without a bad node is among the first where the bad ones are fewer than the pairs; four nodes
                # meet in all ways.
                if len(bad) < count // 2 or (count <= 4 and count - len(bad) >= 2):
                    assert proven
                    assert rounds <= PAIRINGS + max(1, len(bad))


def test_few_good_nodes_try_many_suspects_one_after_the_other():
    nodes = names(8)
    good = {"n0", "n7"}
    tried = []

    def run(pairs):
        tried.append(list(pairs))
        return {pair for pair in pairs if set(pair) <= good}

    assert split_nodes(nodes, run)[0] == ["n0", "n7"]
    assert [len(pairs) for pairs in tried] == [4, 2, 2, 2]
    assert all(set(pair) & good for pairs in tried[1:] for pair in pairs)
