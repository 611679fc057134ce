"""An environment of one role that asks three times."""

from slimrl.agent.environment import Observation

TURNS = 3


class ThreeQuestions:
    async def start(self, prompt, *, seed, scratch):
        return Observation(messages=[*prompt.messages], state_id="begun")

    async def step(self, turn):
        # What was said, in the words of the toy's tokenizer.
        told = f"And {turn.index} {turn.text[:40]}?"
        messages = [{"role": "user", "content": told}]
        return Observation(messages=messages, done=turn.index == TURNS - 1, state_id=told)

    async def close(self):
        return
