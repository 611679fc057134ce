"""What a gateway does now and has done since its process began, for whoever watches the run."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Upper bounds of the histogram of answers' times; one more bucket has what took longer."""
ANSWERED, REFUSED, FAILED, ABANDONED = "answered", "refused", "failed", "abandoned"
"""What becomes of a request of the policy: it is answered; answered with an error of the agent's, or with one of the
engines or the run; or its client is gone before."""


@dataclass
class GatewayActivity:
    """Used on the event loop of the gateway; another thread may read it."""

    open_sessions: int = 0
    sessions: int = 0
    """Sessions that were opened"""
    requests: Counter[str] = field(default_factory=lambda: Counter({ANSWERED: 0, REFUSED: 0, FAILED: 0, ABANDONED: 0}))
    """Number of requests by what became of them"""
    seconds: float = 0.0
    """Sum of the times of all answered requests"""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Number of answered requests by time, a bucket up to and with each of BOUNDS_S and one beyond"""

    def open(self) -> None:
        self.open_sessions += 1
        self.sessions += 1

    def end(self) -> None:
        self.open_sessions -= 1

    def answer(self, seconds: float) -> None:
        """Count a request that was answered after so long."""
        self.requests[ANSWERED] += 1
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1


ACTIVITY = GatewayActivity()
"""Activity of this process's gateway."""
