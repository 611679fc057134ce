"""Limits that stop a run."""

from dataclasses import dataclass

from slimrl.config.schema.types import PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class StopConfig:
    """Limits of a step's metrics: the run stops when a metric is beyond its limit in several steps in a row."""

    patience_steps: PositiveInt = 3
    """Steps in a row beyond a limit that stop the run; steps without an optimizer update do not count."""
    mismatch: PositiveFloat | None = None
    """Largest `mismatch/logprob_abs_mean`; `algorithm.max_logprob_mismatch` stops at the first step."""
    kl: PositiveFloat | None = None
    """Largest `policy/kl`."""
    entropy_min: PositiveFloat | None = None
    """Smallest `policy/entropy`."""
    entropy_max: PositiveFloat | None = None
    """Largest `policy/entropy`."""
    grad_norm: PositiveFloat | None = None
    """Largest `policy/grad_norm`."""
    effective_sample_size_min: PositiveFloat | None = None
    """Smallest `policy/effective_sample_size`."""
