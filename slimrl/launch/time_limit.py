"""A job's time limit as SLURM's `--time` takes it."""

import re

SIGNAL_EARLY_S = 60
"""SLURM may send the signal of `--signal` up to this much early (sbatch's manual)."""

UNLIMITED = ("infinite", "unlimited", "-1")


def time_limit_s(text: str) -> float:
    """A time limit in seconds; infinity for no limit, which 0 means too.

    Raises:
        ValueError: SLURM does not accept it.
    """
    if text.lower() in UNLIMITED:
        return float("inf")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError(
            f"--time {text}: no time limit of SLURM. Use MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS."
        )
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    seconds = 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return seconds or float("inf")


def check_time_limit(text: str, signal_s: int) -> None:
    """Refuse a time limit so short that SLURM asks for a checkpoint as soon as the job starts.

    Raises:
        ValueError: the limit is too short, or SLURM does not accept it.
    """
    if time_limit_s(text) <= signal_s + SIGNAL_EARLY_S:
        raise ValueError(
            f"--time {text}: SLURM would ask for a checkpoint at once: {signal_s} s before the limit (--signal-s), or "
            f"up to {SIGNAL_EARLY_S} s earlier. Give the job more time."
        )
