"""What ends a rollout."""

from collections.abc import Sequence

from slimrl.base.errors import RunError
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.trajectory import Status, Trajectory


class TooManyFailed(RunError):
    """More trajectories failed than the recipe allows; `failed` are these trajectories, for callers that write them to
    a file."""

    def __init__(self, message: str, failed: Sequence[Trajectory]) -> None:
        super().__init__(message)
        self.failed = failed


def refuse_failures(rollout: RolloutConfig, name: str, ended: Sequence[Trajectory], num_counted: int) -> None:
    """Raises TooManyFailed if too many of `num_counted` trajectories failed, all of which are among `ended`."""
    failed = [t for t in ended if t.status in (Status.failed, Status.aborted)]
    limit = rollout.max_failed_fraction
    if len(failed) > limit * num_counted:
        causes = "; ".join(sorted({str(t.metadata.get("error")) for t in failed})[:3])
        raise TooManyFailed(
            f"{name}: {len(failed)} of {num_counted} trajectories failed or were aborted, more than "
            f"rollout.max_failed_fraction = {limit:g} allows: {causes}",
            failed,
        )
