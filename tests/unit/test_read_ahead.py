"""Items made one ahead of their use: order, how far ahead, errors, and what is left early."""

import weakref

import pytest

from slimrl.checkpoints.read_ahead import read_ahead


class Item:
    """Weak references can point to it."""


def test_the_items_come_in_order_and_what_the_iterator_raises_comes_in_its_place():
    def items():
        yield from range(5)
        raise ValueError("the source is broken")

    ahead = read_ahead(items())
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the source is broken"):
        next(ahead)
    assert list(read_ahead(iter(()))) == []


def test_one_item_is_made_while_another_is_in_use_and_none_further_ahead():
    made = []

    def items():
        for number in range(6):
            made.append(number)
            yield number

    ahead = read_ahead(items())
    assert made == []
    for number in ahead:
        assert made[-1] <= number + 1
    assert made == list(range(6))


def test_an_item_is_gone_when_the_one_after_the_next_is_made():
    alive = []

    def items():
        references = []
        for _ in range(4):
            alive.append(sum(reference() is not None for reference in references))
            item = Item()
            references.append(weakref.ref(item))
            yield item
            del item

    for item in read_ahead(items()):
        del item
    assert max(alive) <= 1


def test_what_is_left_early_ends_its_thread():
    def items():
        yield from range(100)

    ahead = read_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert list(ahead) == []
