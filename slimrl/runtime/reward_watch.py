"""Watches the parts of the reward from step to step: repeated calls, and the alarm of rewards/alarm.py."""

import logging
from collections.abc import Sequence

from slimrl.config.schema.reward import RewardConfig
from slimrl.data.trajectory import Trajectory
from slimrl.observability.progress import Progress
from slimrl.rewards.alarm import alarm_text, can_alarm, part_point, series_of, state_of
from slimrl.rewards.parts import RETRIES_KEY, Part
from slimrl.runtime.state import RunState

log = logging.getLogger(__name__)


class RewardWatch:
    def __init__(self, settings: RewardConfig, parts: Sequence[Part], state: RunState, progress: Progress) -> None:
        """`progress` shows the alarm's warning when it begins; the log has it too."""
        self._settings, self._parts, self._state, self._progress = settings, parts, state, progress
        self._alarms = settings.alarm_steps > 0 and can_alarm(parts)

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of a step's scored trajectories, as far as the recipe asks for them; adds to the run's state."""
        found: dict[str, float] = {}
        if self._settings.retries:
            found["reward/retries"] = sum(t.metadata.get(RETRIES_KEY, 0) for t in trajectories)
        if self._alarms:
            found["reward/hacking_alarm"] = self._alarm(trajectories)
        return found

    def _alarm(self, trajectories: Sequence[Trajectory]) -> int:
        """How many proxies are suspicious."""
        steps, before = self._settings.alarm_steps, series_of(self._state.reward_series)
        now = before.followed_by(part_point(trajectories, self._parts), steps)
        self._state.reward_series = state_of(now)
        names = now.suspicious(steps)
        if new := [name for name in names if name not in before.suspicious(steps)]:
            text = alarm_text(new, now, steps)
            log.warning(text)
            self._progress.say(f"warning: {text}")
        return len(names)
