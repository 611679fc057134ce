"""Rewards of turns by a process reward model (PRM): the probability that each step of a solution is right.

The endpoint is vLLM's pooling API, `POST /pooling` with a conversation (docs.vllm.ai, "Pooling Models"), which gives a
row for each step tag: its last number is the probability of a good step. That is how vLLM serves Qwen2.5-Math-PRM
(arXiv:2501.07301), whose step tag is `<extra_0>`.
"""

import math
from enum import Enum
from typing import Any, Unpack

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.http import EndpointError, EndpointSettings
from slimrl.rewards.judge_text import broken_up
from slimrl.rewards.remote import endpoint
from slimrl.rewards.scoring import Score
from slimrl.rewards.texts import own_messages

POOLING = "/pooling"


class TurnCredit(str, Enum):
    worst = "worst"
    """The worst turn has its score and the others 0, so the sum is the lowest score: more turns do not earn more (the
    min-form of PURE, arXiv:2504.15275)."""
    each = "each"
    """Each turn has its own score: their sum grows with the number of turns."""


class ProcessReward:
    """Scores of turns, from -1 (surely wrong) to 1, as rewards of turns; the reward besides them is 0.

    Args:
        url: of the server, without `/pooling`.
        model: name of the process reward model.
        credit: `worst` or `each`.
        step_tag: text that ends a step for the model.
        api_key_env, max_running, timeout_s, retries: see JsonEndpoint.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        credit: str = "worst",
        step_tag: str = "<extra_0>",
        **settings: Unpack[EndpointSettings],
    ) -> None:
        if not model or not step_tag:
            raise ValueError("model and step_tag must not be empty")
        if credit not in list(TurnCredit):
            raise ValueError(f"credit: {credit!r} is neither worst nor each")
        self._endpoint, self._model = endpoint(url, settings, adds=POOLING), model
        self._credit, self._tag = TurnCredit(credit), step_tag

    async def start(self) -> None:
        """Raises EndpointError, TimeoutError or ConnectionError if the model is not served as it should be."""
        await self._endpoint.start()
        await self._scores("1 + 1?", ["2"])

    async def close(self) -> None:
        await self._endpoint.close()

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Score:
        """Raises what JsonEndpoint.post raises, and EndpointError for an answer of another form."""
        texts = [_text(message) for message in own_messages(trajectory) if message["role"] == "assistant"]
        # A turn that ran out of tokens within its thinking has no message, and is worth what a wrong one is.
        missing = [-1.0] * (trajectory.num_turns - len(texts))
        said = [place for place, text in enumerate(texts) if text]
        scores = [-1.0] * len(texts)
        asked = "\n\n".join(str(message["content"]) for message in prompt.messages if message["role"] == "user")
        if said:
            for place, score in zip(said, await self._scores(asked, [texts[one] for one in said]), strict=True):
                scores[place] = score
        scores += missing
        if self._credit is TurnCredit.worst and scores:
            worst = scores.index(min(scores))
            scores = [score if place == worst else 0.0 for place, score in enumerate(scores)]
        return Score(reward=0.0, turn_rewards=scores)

    async def _scores(self, asked: str, steps: list[str]) -> list[float]:
        """Twice the probability of each step less 1."""
        solution = "".join(self._without_tags(step) + self._tag for step in steps)
        messages = [{"role": "user", "content": self._without_tags(asked)}, {"role": "assistant", "content": solution}]
        answer = await self._endpoint.post(POOLING, {"model": self._model, "messages": messages})
        try:
            rows = answer["data"][0]["data"]
            scores = [2 * float(row[-1]) - 1 for row in rows]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EndpointError(f"{self._endpoint.url} gave no scores of steps: {str(answer)[:200]}") from error
        if len(scores) != len(steps) or not all(math.isfinite(score) and abs(score) <= 1 for score in scores):
            raise EndpointError(f"{self._endpoint.url} gave {str(rows)[:200]} for {len(steps)} steps")
        return scores

    def _without_tags(self, text: str) -> str:
        """A text in which the policy has written no step tag and no mark of a chat template."""
        return broken_up(text.replace(self._tag, " "))


def _text(message: dict[str, Any]) -> str:
    """A turn's text and its calls, without thinking."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join([(message["content"] or "").strip(), *map(str, calls)]).strip()
