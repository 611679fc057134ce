"""A job's time limit as SLURM's `--time` takes it."""

import re

SIGNAL_EARLY_S = 60
"""By so much SLURM may send the signal of `--signal` before it is due, says its documentation."""

UNLIMITED = ("infinite", "unlimited", "-1")

_FORMATS = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?P<hours>\d+):(?P<hour_minutes>\d+):(?P<hour_seconds>\d+)"
    r"|(?P<minutes>\d+)(?::(?P<minute_seconds>\d+))?)"
)
"""DAYS-HOURS[:MINUTES[:SECONDS]], HOURS:MINUTES:SECONDS, MINUTES[:SECONDS]."""

_UNITS_S = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def time_limit_s(text: str) -> float:
    """Seconds of a limit; infinity where there is none, which a limit of 0 means too.

    Raises:
        ValueError: SLURM does not take it.
    """
    if text.lower() in UNLIMITED:
        return float("inf")
    found = _FORMATS.fullmatch(text)
    if found is None:
        raise ValueError(
            f"--time {text}: not as SLURM takes it. Use MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS."
        )
    parts = {name.rpartition("_")[2]: int(value) for name, value in found.groupdict().items() if value is not None}
    seconds = sum(_UNITS_S[name] * value for name, value in parts.items())
    return seconds or float("inf")


def check_time_limit(text: str, signal_s: int) -> None:
    """Refuse a job that would be asked for a checkpoint as soon as it begins.

    Args:
        signal_s: before its limit SLURM sends the signal.

    Raises:
        ValueError: it is such a job, or the limit is none that SLURM takes.
    """
    if time_limit_s(text) <= signal_s + SIGNAL_EARLY_S:
        raise ValueError(
            f"--time {text}: the job would be asked for a checkpoint at once, since that comes {signal_s} s before its "
            f"limit (--signal-s), or up to {SIGNAL_EARLY_S} s earlier. Give it more time."
        )
