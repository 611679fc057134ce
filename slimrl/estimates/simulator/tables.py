"""Simulated modes as a table for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from slimrl.estimates.simulator.cluster import Cluster
from slimrl.estimates.simulator.outcome import Outcome
from slimrl.estimates.simulator.schedule import Schedule
from slimrl.observability.terminal import plain_console

PIPED_COLUMNS = 160
COLUMNS = (
    "GPUs", "mode", "steps/h", "trajectories/s", "times", "trainer idle", "engines idle", "slots used", "staleness",
    "p95", "max", "dropped", "aborted", "p99/p50",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    cluster: Cluster
    schedule: Schedule
    outcome: Outcome
    shared: bool = False
    """Whether trainer and engines work in turns on all GPUs"""
    own: bool = False
    """Whether it is the schedule of the recorded run"""
    problems: Sequence[str] = ()
    """Reasons why the layout does not fit, as far as it is planned"""

    @property
    def mode(self) -> str:
        marks = {"shared": self.shared, "the run's": self.own, "does not fit": bool(self.problems)}
        return ", ".join([self.schedule.name, *(mark for mark, holds in marks.items() if holds)])

    @property
    def split(self) -> str:
        """GPUs of the trainer and of the engines, or those that both have."""
        cluster = self.cluster
        if cluster.engine_gpus:
            return f"{cluster.trainer_ranks} + {cluster.engine_gpus}"
        return f"{cluster.trainer_ranks}" if self.shared else f"{cluster.trainer_ranks} for both"

    def as_json(self) -> dict[str, Any]:
        cluster = self.cluster
        return {
            "mode": self.schedule.mode.value,
            "max_staleness": self.schedule.max_staleness,
            "too_old": self.schedule.too_old.value,
            "shared_gpus": self.shared,
            "of_the_run": self.own,
            "gpus": cluster.gpus,
            "trainer_ranks": cluster.trainer_ranks,
            "num_engines": cluster.num_engines,
            "train_s": cluster.train_s,
            "resync_s": cluster.resync_s,
            "problems": list(self.problems),
            **self.outcome.as_json(),
        }


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """`times` is over the first row of the same number of GPUs that are not shared."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        outcome, ages = row.outcome, row.outcome.ages_sorted()
        first = next(other for other in rows if other.cluster.gpus == row.cluster.gpus and not other.shared)
        table.add_row(
            row.split,
            row.mode,
            f"{outcome.steps_per_hour:,.1f}",
            f"{outcome.trajectories_per_s:,.2f}",
            f"{outcome.trajectories_per_s / first.outcome.trajectories_per_s:.2f}",
            *(f"{share:.0%}" for share in (outcome.trainer_idle, outcome.engines_idle, outcome.slots_used)),
            f"{ages.mean():.2f}",
            f"{np.percentile(ages, 95, method='higher'):.0f}",
            str(ages.max()),
            f"{outcome.dropped:,}",
            f"{outcome.aborted:,}",
            f"{outcome.tail:.1f}",
        )
    plain_console(piped_columns=PIPED_COLUMNS).print(table)
