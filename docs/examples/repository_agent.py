"""Runs a coding agent on a small repository, and posts whether it made the tests pass.

    python repository_agent.py qwen -p PROMPT --yolo --auth-type openai

The data line's `metadata` has the repository as `files`, texts by path, and in `check` the Python code that tests it.
The files are written into the workspace, the line's last message takes the place of the word PROMPT, and what the
agent has left there is tested with the code of the line, which the agent never sees (docs/gateway.md). That code runs
in one process with what it imports from the workspace, which a policy may learn to end well by `os._exit(0)`: a check
that has to withstand this starts a process of its own and judges what that prints.
"""

import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

CHECK_S = 60.0


def reward_key() -> str:
    """The key with which this process posts the reward; no other process may have it, so it is read first of all."""
    key = os.read(int(os.environ["SLIMRL_REWARD_FD"]), 100).decode().strip()
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: other processes of this user cannot read this one's memory
    return key


def write_repository(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def passes(check: str) -> bool:
    """Whether the code ends well in the workspace."""
    try:
        return not subprocess.run([sys.executable, "-c", check], stdin=subprocess.DEVNULL, timeout=CHECK_S).returncode
    except subprocess.TimeoutExpired:
        return False


def post_reward(reward: float, key: str) -> None:
    request = urllib.request.Request(
        os.environ["SLIMRL_REWARD_URL"],
        json.dumps({"reward": reward}).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    # The server is on this machine's network: no proxy.
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def main() -> None:
    key = reward_key()
    line = json.load(sys.stdin)
    task, prompt = line["metadata"], line["messages"][-1]["content"]
    write_repository(task["files"])
    words = [prompt if word == "PROMPT" else word for word in sys.argv[1:]]
    if code := subprocess.run(words, stdin=subprocess.DEVNULL).returncode:
        sys.exit(code)
    post_reward(float(passes(task["check"])), key)


if __name__ == "__main__":
    main()
