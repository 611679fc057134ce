"""Reward for an answer that comes with an honest confidence."""

import re
from typing import Any

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.loading import NO_SUPPLIES, Supplies
from slimrl.rewards.texts import check_tag, last_text, only_tagged
from slimrl.rewards.verifier import OfVerifier

_CONFIDENCE = re.compile(r"(?P<number>\d{1,3}(\.\d{1,6})?|\.\d{1,6})\s*(?P<percent>%?)", re.ASCII)


class Calibration(OfVerifier):
    """Correctness c, and minus the Brier score of the confidence q that the last text states: c - (q - c)^2.

    This is RLCR (arXiv:2507.16806). The sum is greatest for the answer that is most likely right with the
    confidence that it is right. The Brier score alone would be greatest for a wrong answer with confidence 0, so the
    two are one reward: use no second part for the correctness. No confidence, several, or one that is no number from 0
    to 1 (or percent from 0 to 100) counts as the worst, (q - c)^2 = 1.

    Args:
        of, of_args: the verifier, as `function` and `args` in `reward.parts`.
        tag: the confidence stands between `<tag>` and `</tag>`, once.
    """

    def __init__(
        self,
        *,
        of: str,
        of_args: dict[str, Any] | None = None,
        tag: str = "confidence",
        supplies: Supplies = NO_SUPPLIES,
    ) -> None:
        super().__init__(of, of_args, supplies)
        check_tag(tag, "confidence")
        self._tag = tag

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> dict[str, float]:
        """Raises what the verifier raises."""
        right = await self.correctness(trajectory, prompt)
        stated = stated_confidence(last_text(trajectory) or "", self._tag)
        return {"correct": right, "brier": -1.0 if stated is None else -((stated - right) ** 2)}


def stated_confidence(text: str, tag: str) -> float | None:
    """The number from 0 to 1 in the one pair of tags; None if there is none."""
    found = _CONFIDENCE.fullmatch((only_tagged(text, tag) or "").strip())
    if found is None:
        return None
    value = float(found["number"]) / (100 if found["percent"] else 1)
    return value if value <= 1 else None
