"""Episodes of BFCL that tests play in the environment's own interpreter."""

import json
from pathlib import Path
from typing import Any

from venvs import run_in

PRELUDE = """
import json
from slimrl.agent.environment import Turn
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.prompt import Prompt
from slimrl.environments.bfcl.data import entries
from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.environment import BfclEnvironment
from slimrl.environments.bfcl.later import CALL_LATER
from slimrl.environments.bfcl.players import RandomPlayer, Solver

def prompt(entry):
    metadata = json.loads(json.dumps(entry.to_metadata()))
    return Prompt(prompt_id=entry.id, messages=entry.questions[0], label=None, metadata=metadata)

def play(entry, player, **arguments):
    environment, asked = BfclEnvironment(**arguments), prompt(entry)
    seen = environment.start(asked, seed=0, scratch={})
    playing, rewards = player(asked, 0), []
    while not (seen.done or seen.truncated):
        seen = environment.step(playing.turn(seen))
        rewards.append(seen.reward)
    environment.close()
    return {"reward": sum(rewards), "done": seen.done, **seen.metrics}

class Script:
    # Turns of (name, arguments) pairs; an empty one answers.
    def __init__(self, *turns): self.left = list(turns)
    def __call__(self, prompt, seed): return self
    def turn(self, seen):
        calls = self.left.pop(0) if self.left else ()
        return Turn(index=0, text="Done.", calls=tuple(ToolCall(name=name, arguments=given) for name, given in calls))

def files(*truth, **contents):
    # One request about a folder with these files.
    inside = {name: {"type": "file", "content": text} for name, text in contents.items()}
    config = {"GorillaFileSystem": {"root": {"home": {"type": "directory", "contents": inside}}}}
    asked = [[{"role": "user", "content": "Do it."}] for _ in truth]
    return Entry(id="own_0", involved_classes=["GorillaFileSystem"], initial_config=config, questions=asked,
                 ground_truth=list(truth))

def started(entry, **arguments):
    environment = BfclEnvironment(**arguments)
    environment.start(prompt(entry), seed=0, scratch={})
    return environment

def told(environment, name, /, **given):
    turn = Turn(index=0, text="", calls=(ToolCall(name=name, arguments=given),))
    return environment.step(turn).messages[0]["content"]

def answer(environment):
    return environment.step(Turn(index=0, text="Done."))
"""


STUBS = """
# Packages that the package imports for models' APIs are not in the environment's lock.
import importlib.machinery, importlib.util, os, sys, tempfile, types
from unittest.mock import MagicMock
os.environ["BFCL_PROJECT_ROOT"] = tempfile.mkdtemp()
class Anything(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return MagicMock()
class Stubs:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        is_real = top in sys.stdlib_module_names or top in ("bfcl_eval", "slimrl", "mpmath")
        return None if is_real else importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec): return Anything(spec.name)
    def exec_module(self, module): pass
sys.meta_path.append(Stubs())
"""


def say(code: str) -> Any:
    """What the code, after PRELUDE, says in the environment's own interpreter: the value of `said`."""
    printed = run_in("bfcl", f"{PRELUDE}\n{code}\nprint()\nprint(json.dumps(said))")
    return json.loads(printed.splitlines()[-1])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
