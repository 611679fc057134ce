"""The request for a turn of the policy, from the run's limits and sampling settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimrl.agent.dialogue import Dialogue
from slimrl.base.seeds import derive_seed
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import GenerateRequest


@dataclass(frozen=True, kw_only=True)
class TurnRequests:
    """Makes the engine requests for the turns of one trajectory.

    Args:
        session_id: of all requests.
        seed: the seeds of the requests are derived from it; None lets the engine choose.
    """

    rollout: RolloutConfig
    sampling: SamplingConfig
    session_id: str
    seed: int | None

    def fork(self, number: int) -> "TurnRequests":
        """Those of another branch of the trajectory."""
        return self if self.seed is None else replace(self, seed=derive_seed(self.seed, "fork", number))

    def make(
        self,
        tokens: Sequence[int],
        dialogue: Dialogue,
        *,
        path: Sequence[int | str],
        max_new_tokens: int,
        experts_from: int,
        stop: Sequence[str] = (),
    ) -> GenerateRequest:
        """
        Args:
            tokens: before the turn.
            path: tells the turn from all others of the trajectory; its seed follows from it.
            stop: texts that end the turn too.
        """
        return GenerateRequest(
            session_id=self.session_id,
            input_ids=list(tokens),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            max_new_tokens=max_new_tokens,
            stop_token_ids=() if self.sampling.ignore_end_of_turn else dialogue.stop_token_ids,
            stop=tuple(stop),
            timeout_s=self.rollout.request_timeout_s,
            seed=None if self.seed is None else derive_seed(self.seed, "turn", *path),
            experts_from=experts_from,
        )
