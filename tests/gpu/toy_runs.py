"""Runs of `slimrl train` on one GPU: a toy whose sizes suit its kernels, and on a CPU the smallest one."""

from pathlib import Path

from cli_runs import SIZE, Workspace, make_workspace
from machine import choose
from slimrl_tools.toy.toy import ToySize

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

RECIPE = str(Path(__file__).parents[2] / "recipes" / "single_gpu" / "tiny_moe_gspo.yaml")
RUN_S = 280.0
GPU_SIZE = ToySize(layers=2, hidden=128, head_dim=64, moe_intermediate=128)


def workspace_at(path: Path) -> Workspace:
    return make_workspace(path, size=choose(GPU_SIZE, SIZE))


def assert_verified(folder: RunFolder, steps: int, *, mismatch: float) -> list[dict]:
    """The lines of all steps: every tensor of each version compared, weights updated, log-probs as the engine's."""
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert {line["resync/fingerprint_mismatches"] for line in lines} == {0}
    for line in lines[1:]:
        assert line["policy/grad_norm"] > 0
        assert 0 < line["mismatch/logprob_abs_mean"] < mismatch
    return lines
