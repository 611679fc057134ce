"""The slopes of benchmarks/soak.py against noise without and with a trend, and a short run of it."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sandboxes import needs_namespaces
from test_benchmarks import BENCHMARKS, assert_positive, figures_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("slopes")


def series(slope: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hours, and values that grow by `slope` an hour under noise of which neighbours have much in common."""
    rng, hours = np.random.default_rng(seed), np.linspace(0, 3, 2000)
    noise = np.convolve(rng.normal(size=2009), np.ones(10) / np.sqrt(10), mode="valid")
    return hours, 50 + slope * hours + noise


def test_noise_has_a_slope_about_as_seldom_as_the_confidence_says(slopes: ModuleType):
    found = [slopes.slope_of(*series(0.0, seed), 0.9) for seed in range(300)]
    wrong = np.mean([not one.is_zero for one in found])
    # 300 draws of 0.1 have a standard error of 0.017.
    assert 0.05 < wrong < 0.16
    assert np.mean([one.mean for one in found]) == pytest.approx(50, abs=0.02)


def test_a_slope_lies_in_its_interval_as_often_as_the_confidence_says(slopes: ModuleType):
    found = [slopes.slope_of(*series(0.7, seed), 0.9) for seed in range(300)]
    within = np.mean([abs(one.per_hour - 0.7) <= one.half_width for one in found])
    assert 0.84 < within < 0.95
    assert np.mean([not one.is_zero for one in found]) > 0.9
    with pytest.raises(ValueError, match="5 measurements are too few"):
        slopes.slope_of(range(5), range(5), 0.9)


@pytest.mark.full
@needs_namespaces
def test_a_short_run_is_watched(tmp_path: Path):
    arguments = [
        "--folder", str(tmp_path / "bench"), "--minutes", "1.5", "--every", "1", "--sft-updates", "21",
        "--problems", "4", "rollout.sampling.max_new_tokens=8", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
    ]  # fmt: skip
    # That caches fill is more than nothing in so short a time.
    figures = figures_of("soak", tmp_path / "soak.json", *arguments, timeout_s=880, codes=(0, 1))
    assert figures["steps"] > 20
    for name in ("driver: memory, MB", "trainer: memory, MB", "engine: memory, MB", "Ray: memory, MB", "step, s"):
        assert_positive(figures["slopes"][name]["mean"])
    watched = {*figures["slopes"], *figures["constant"]}
    assert {"driver: descriptors", "engine: threads", "/dev/shm, MB", "run folder, MB"} <= watched
    assert set(figures["growing"]) <= set(figures["slopes"]) - {"run folder, MB"}
