"""Runs a program whose task is an argument: the data line's last message takes the place of the word PROMPT.

    python prompt_agent.py claude -p PROMPT --dangerously-skip-permissions

Its stdin is empty, since programs of this kind take what they find there as a part of the task (docs/gateway.md).
"""

import json
import os
import sys


def main() -> None:
    prompt = json.load(sys.stdin)["messages"][-1]["content"]
    words = [prompt if word == "PROMPT" else word for word in sys.argv[1:]]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
