"""How the tests' own ranks begin."""

import multiprocessing

import pytest
import ranks
import torch
from ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


def begun(rank, num_ranks, port):
    return rank, num_ranks, multiprocessing.get_start_method()


@pytest.mark.parametrize(("has_gpu", "method"), [(True, "spawn"), (False, "forkserver")])
def test_ranks_are_not_forked_from_a_process_that_has_asked_for_gpus(monkeypatch, has_gpu, method):
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: has_gpu)
        assert ranks.start_method() == method
    monkeypatch.setattr(ranks, "start_method", lambda: method)
    assert run_ranks(begun, 2, timeout_s=90) == [(0, 2, method), (1, 2, method)]
