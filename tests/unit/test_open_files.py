"""The limit of open files before the groups of p2p are formed."""

import multiprocessing
import resource

import pytest

from slimrl.resync.p2p.open_files import allow_connections


def limits_after(count: int, soft: int, hard: int) -> tuple[int, int] | str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        allow_connections(count)
    except OSError as error:
        return str(error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def in_a_process(*arguments: int) -> tuple[int, int] | str:
    """A hard limit cannot be raised again."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(limits_after, arguments)


@pytest.mark.parametrize("count", [1, 3000])
def test_the_soft_limit_is_raised_where_it_is_too_low(count):
    soft, hard = in_a_process(count, 1024, 8192)
    assert hard == 8192
    assert (soft == 1024) if count == 1 else (3512 < soft < 4096)


def test_a_hard_limit_that_is_too_low_is_named_with_what_suffices():
    said = in_a_process(4500, 1024, 4096)
    assert "open files in a trainer rank, the hard limit is 4096. Raise it on each node" in said
    assert 4500 + 512 < int(said.split("needs ")[1].split()[0]) < 4500 + 700
