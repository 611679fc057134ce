"""Imports of commands run without garbage collection, and what they made is left alone by later ones."""

import gc

import pytest

from slimrl.base.imports import imports_uncollected


@pytest.fixture(autouse=True)
def thaw():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_meanwhile_and_what_was_made_is_left_alone_later():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with imports_uncollected():
            made = [[] for _ in range(100_000)]
        assert not collections
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_collection_comes_back_after_a_failed_import_and_stays_off_where_it_was_off():
    with pytest.raises(ImportError), imports_uncollected():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with imports_uncollected():
        pass
    assert not gc.isenabled()
