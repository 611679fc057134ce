"""Tells when the policy games its reward: a proxy rises while what is checked against the truth falls.

1. Each step adds a point to each series: the mean over trajectories of what the verified parts count in the reward, all
   together, and of what each proxy counts. Trajectories without such a part are left out.
2. A series that has the last `steps` points is cut into an older and a newer half.
3. It rises or falls if the means of its halves differ by more than `SIGMAS` standard errors of their difference.
4. The proxies that rise while the verified series falls are suspicious.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.parts import Part

SIGMAS = 2.0
"""Smaller changes are noise. Both changes must exceed it: of windows of 20 steps of pure noise, one in about 1,000
alarms."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PartSeries:
    """The last points of each series, oldest first."""

    verified: list[float] = field(default_factory=list)
    proxies: dict[str, list[float]] = field(default_factory=dict)

    def followed_by(self, point: "PartPoint", steps: int) -> "PartSeries":
        """The series with a step's point, as far as it has one, cut to `steps` points each."""
        verified = [] if point.verified is None else [point.verified]
        names = dict.fromkeys([*self.proxies, *point.proxies])
        added = {name: [point.proxies[name]] if name in point.proxies else [] for name in names}
        return PartSeries(
            verified=[*self.verified, *verified][-steps:],
            proxies={name: [*self.proxies.get(name, []), *added[name]][-steps:] for name in names},
        )

    def suspicious(self, steps: int) -> list[str]:
        """The proxies that rise while the verified parts fall."""
        if not _moves(self.verified, steps, sign=-1):
            return []
        return [name for name, points in self.proxies.items() if _moves(points, steps, sign=1)]


@dataclass(frozen=True, kw_only=True)
class PartPoint:
    """One step's point of each series, in units of the reward."""

    verified: float | None
    """Mean of what the verified parts count; None if no trajectory has a verified part"""
    proxies: dict[str, float]


def part_point(trajectories: Sequence[Trajectory], parts: Sequence[Part]) -> PartPoint:
    """What the parts count in the rewards of a step's trajectories, failed ones left out."""
    verified: list[float] = []
    proxies: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.status is Status.failed:
            continue
        counted = [(part, part.counted(trajectory.rewards[part.name])) for part in parts if _counts(part, trajectory)]
        if any(part.verified for part, _ in counted):
            verified.append(math.fsum(value for part, value in counted if part.verified))
        for part, value in counted:
            if not part.verified:
                proxies.setdefault(part.name, []).append(value)
    return PartPoint(
        verified=fmean(verified) if verified else None,
        proxies={name: fmean(values) for name, values in proxies.items()},
    )


def can_alarm(parts: Sequence[Part]) -> bool:
    """Whether there are a verified part and a proxy that count in the reward."""
    return {True, False} <= {part.verified for part in parts if part.name and part.weight}


def alarm_text(names: Sequence[str], series: PartSeries, steps: int) -> str:
    """The warning for a reader."""
    changes = [f"{name} {_halves(series.proxies[name])}" for name in names]
    return (
        f"reward hacking? Over the last {steps} steps the verified parts of the reward fell "
        f"({_halves(series.verified)}) while proxies rose: {', '.join(changes)}"
    )


def _counts(part: Part, trajectory: Trajectory) -> bool:
    return part.weight != 0 and part.name in trajectory.rewards


def _moves(points: Sequence[float], steps: int, *, sign: int) -> bool:
    if len(points) < steps:
        return False
    older, newer = points[: steps // 2], points[steps // 2 :]
    error = math.sqrt(_squared_error(older) + _squared_error(newer))
    return sign * (fmean(newer) - fmean(older)) > SIGMAS * error + _ROUNDING


def _squared_error(points: Sequence[float]) -> float:
    """Squared standard error of the mean."""
    return variance(points) / len(points)


def _halves(points: Sequence[float]) -> str:
    half = len(points) // 2
    return f"{fmean(points[:half]):.3g} -> {fmean(points[half:]):.3g}"


def series_of(state: Mapping[str, list[float]]) -> PartSeries:
    """The series from the form in which a checkpoint keeps them: proxies by name, the verified one under ""."""
    proxies = {name: points for name, points in state.items() if name}
    return PartSeries(verified=list(state.get("", [])), proxies=proxies)


def state_of(series: PartSeries) -> dict[str, list[float]]:
    """The inverse of `series_of`."""
    return {"": series.verified, **series.proxies}
