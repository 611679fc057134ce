"""Lines of prompt files, and demonstrations for a cold start: players of mixed quality play games of text."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimrl.agent.environment import Message
from slimrl.data.prompt import Prompt
from slimrl.environments.play import Player
from slimrl.environments.textworld.text_game import TextGame

SKILLS = (0.0, 0.3, 0.6, 1.0)
"""Probabilities that a turn of a demonstration is the right one, in turns"""


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def prompt_of(line: dict[str, Any]) -> Prompt:
    """The prompt of a line of a prompt file that a game's data has."""
    messages = [{"role": "user", "content": line["prompt"]}]
    return Prompt(prompt_id=line["id"], messages=messages, label=line["label"], metadata=line["metadata"])


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


def write_demonstrations(out: Path, conversations: Iterable[list[Message]]) -> None:
    """Write them as `sft.jsonl`, and their texts as `words.txt`, for a tokenizer that knows these words."""
    shown = list(conversations)
    write_lines(out / "sft.jsonl", ({"messages": messages} for messages in shown))
    texts = dict.fromkeys(str(message["content"]) for messages in shown for message in messages)
    (out / "words.txt").write_text("\n".join(texts) + "\n")
