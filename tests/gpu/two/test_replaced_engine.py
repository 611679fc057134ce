"""A run of two ranks and two engines on two GPUs that loses one of the engines."""

import pytest
from cli_runs import CliRun
from toy_runs import RECIPE, RUN_S, assert_verified, workspace_at

pytestmark = pytest.mark.timeout(600)

MISMATCH_NAT = 0.05
STEPS = 3


@pytest.mark.proves("an engine beside a trainer on its GPU is replaced in the memory that is free, and the run goes on")
def test_a_colocated_engine_that_is_killed_in_step_two_is_replaced(tmp_path, figure):
    workspace = workspace_at(tmp_path)
    folder = workspace.run_folder("replaced")
    settings = (
        "run.name=replaced", f"steps={STEPS}", "resync.verify=full", "trainer.num_ranks=2", "trainer.parallel.expert=2",
        "rollout.num_engines=2",
        # A version more is sent to the engine that comes back.
        "reward.function=toy_reward:low_tokens_of_any_version",
    )  # fmt: skip
    run = CliRun(["train", RECIPE, *workspace.overrides(*settings)])
    try:
        run.wait_until(folder.sample_file(2).is_file, RUN_S)
        run.kill_server(1)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    lines = assert_verified(folder, STEPS, mismatch=MISMATCH_NAT)
    assert sum(line["resync/replaced_engines"] for line in lines) == 1
    figure(f"step with the replacement {max(line['time/step_s'] for line in lines[1:]):.1f} s")
