"""A task of several turns, of which some take long, and a reward that writes down what it scores."""

import asyncio
import json
import os
import random
from pathlib import Path

from safetensors.torch import load_file, save_file
from toy_reward import low_tokens_of_any_version

from slimrl.agent.environment import Observation
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory, to_json

TURNS = 4
FILE_VARIABLE = "SLOW_TALK_FILE"
"""Names the file in which `noted` writes a line for each trajectory"""


class SlowTalk:
    """Every fourth episode takes a few seconds for each turn."""

    async def start(self, prompt, *, seed, scratch):
        self.takes_s = 2.5 if seed % 4 == 0 else 0.05
        self.random = random.Random(seed)
        return Observation(messages=prompt.messages)

    async def step(self, turn):
        await asyncio.sleep(self.takes_s)
        if turn.index == TURNS - 1:
            return Observation(done=True)
        return Observation(messages=[{"role": "user", "content": f"And {self.random.randrange(1000)}?"}])

    async def close(self):
        return


def noted(trajectory: Trajectory, prompt: Prompt) -> float:
    line = {"pid": os.getpid(), **to_json(trajectory)}
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return low_tokens_of_any_version(trajectory, prompt)


def end_turns(model: Path) -> None:
    """Make a random model end about every tenth token's turn.

    All embeddings get a common part, which the last norm keeps, and the end token's row of the head answers to it.
    """
    [path] = model.glob("*.safetensors")
    tensors = load_file(path)
    config = json.loads((model / "config.json").read_text())
    tensors["model.embed_tokens.weight"] += 1.0
    tensors["lm_head.weight"][config["eos_token_id"]] += 6.0 / config["hidden_size"]
    save_file(tensors, path, metadata={"format": "pt"})
