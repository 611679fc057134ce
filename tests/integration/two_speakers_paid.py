"""Two roles that speak in turn, and an environment that pays the one whose last turn begins with the lower letter."""

from two_speakers import TURNS, TwoSpeakers

from slimrl.agent.environment import Observation


class PaidSpeakers(TwoSpeakers):
    def __init__(self) -> None:
        self._texts: list[str] = []

    async def step(self, turn):
        self._texts.append(turn.text)
        observation = await super().step(turn)
        if turn.index < TURNS - 1:
            return observation
        first, second = self._texts[-2:]
        sign = float((first < second) - (first > second))
        return Observation(done=True, role_rewards={"first": sign, "second": -sign})
