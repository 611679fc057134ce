"""Demonstrations for a cold start: players of mixed quality play games of text."""

from slimrl.agent.environment import Message
from slimrl.data.prompt import Prompt
from slimrl.environments.play import Player
from slimrl.environments.textworld.text_game import TextGame

SKILLS = (0.0, 0.3, 0.6, 1.0)
"""Probabilities that a turn of a demonstration is the right one, in turns"""


def conversation(environment: TextGame, prompt: Prompt, player: Player, max_turns: int) -> list[Message]:
    """A game as the environment tells it and a player plays it; ends with the player's last turn."""
    observation = environment.start(prompt, seed=0, scratch={})
    messages = list(observation.messages)
    for _ in range(max_turns):
        turn = player.turn(observation)
        messages.append({"role": "assistant", "content": turn.text})
        observation = environment.step(turn)
        if observation.done:
            break
        messages += observation.messages
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]
