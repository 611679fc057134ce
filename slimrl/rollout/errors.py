"""What ends a rollout."""

from collections.abc import Sequence

from slimrl.base.errors import RunError
from slimrl.data.trajectory import Trajectory


class TooManyFailed(RunError):
    """More trajectories failed than the recipe allows; `failed` are these trajectories, for callers that write them to
    a file."""

    def __init__(self, message: str, failed: Sequence[Trajectory]) -> None:
        super().__init__(message)
        self.failed = failed
