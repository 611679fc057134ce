"""What several files of tests with ranks begin with."""

import pytest


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Path of the initial weights of the tiny model of trainer_cases."""
    # Not of tests without ranks, which would wait for these imports.
    from ranks import run_ranks
    from trainer_cases import save_initial_weights

    path = str(tmp_path_factory.mktemp("weights") / "initial")
    run_ranks(save_initial_weights, 1, path)
    return path
