"""The modes that a simulation compares."""

from dataclasses import dataclass

from slimrl.config.schema.rollout import RolloutConfig, RolloutMode, TooOld

STALENESS = (1, 2, 4, 8)
"""Values of max_staleness for the asynchronous modes that are compared"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    mode: RolloutMode
    max_staleness: int
    too_old: TooOld = TooOld.drop

    @property
    def name(self) -> str:
        return f"{self.mode.value} {self.max_staleness}" if self.mode is RolloutMode.async_ else self.mode.value


SYNC = Schedule(mode=RolloutMode.sync, max_staleness=0)
ONE_STEP_OFF = Schedule(mode=RolloutMode.one_step_off, max_staleness=1)


def asynchronous(max_staleness: int, too_old: TooOld) -> Schedule:
    return Schedule(mode=RolloutMode.async_, max_staleness=max_staleness, too_old=too_old)


def all_schedules(too_old: TooOld) -> list[Schedule]:
    return [SYNC, ONE_STEP_OFF, *(asynchronous(staleness, too_old) for staleness in STALENESS)]


def recorded_schedules(rollout: RolloutConfig) -> tuple[list[Schedule], Schedule | None]:
    """All schedules, that of a recorded run among them; and which it is, None for partial rollouts, which have none."""
    schedules = all_schedules(rollout.too_old)
    if rollout.oversample > 1:
        return schedules, None
    if (own := schedule_of(rollout)) not in schedules:
        schedules.append(own)
    return sorted(schedules, key=lambda schedule: schedule.max_staleness), own


def schedule_of(rollout: RolloutConfig) -> Schedule:
    """The schedule of a recipe."""
    if rollout.mode is RolloutMode.async_:
        return asynchronous(rollout.max_staleness, rollout.too_old)
    return SYNC if rollout.mode is RolloutMode.sync else ONE_STEP_OFF
