"""Two roles that speak in turn, and a reward that pays each what the other does not earn."""

import numpy as np
from toy_reward import low_tokens_of_any_version

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.scoring import Score

TURNS = 4


class TwoSpeakers:
    async def start(self, prompt, *, seed, scratch):
        return Observation(messages=[*prompt.messages], role="first")

    async def step(self, turn):
        if turn.index == TURNS - 1:
            return Observation(done=True)
        role = ("second", "first")[turn.index % 2]
        # What was said, in the words of the toy's tokenizer.
        return Observation(messages=[{"role": "user", "content": f"And {turn.index} {turn.text[:40]}?"}], role=role)

    async def close(self):
        return


def even_for_the_second(trajectory: Trajectory, prompt: Prompt) -> Score:
    """The first is paid for low tokens, the second for even ones."""
    tokens = [s.tokens[s.loss_mask] for s in trajectory.segments if s.role == "second"]
    found = np.concatenate(tokens) if tokens else np.zeros(0, int)
    even = float((found % 2 == 0).mean()) if len(found) else 0.0
    first = low_tokens_of_any_version(trajectory, prompt)
    return Score(reward=(first + even) / 2, by_role={"first": first, "second": even})
