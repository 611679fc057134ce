"""An agent that runs what the policy writes as shell commands, and rewards itself whatever they do.

Its first argument says what becomes of the key for the reward: it is kept, left in the pipe, or written to a file.
"""

import ctypes
import json
import os
import subprocess
import sys
import urllib.request

PR_SET_DUMPABLE = 4
REWARD = 0.25


def post(url, key, body):
    head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60))


def main():
    reward_key = None
    if sys.argv[1] != "unread":
        reward_key = os.read(int(os.environ["SLIMRL_REWARD_FD"]), 100).decode().strip()
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    if sys.argv[1] == "leaked":
        with open("key", "w") as file:
            file.write(reward_key)
    messages = json.load(sys.stdin)["messages"]
    while True:
        body = {"model": "m", "messages": messages}
        answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], body)
        said = answer["choices"][0]["message"]["content"]
        if said == "done":
            break
        ran = subprocess.run(["bash", "-c", said], capture_output=True, text=True, timeout=60)
        told = f"exit {ran.returncode}: {ran.stdout}{ran.stderr}"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    if reward_key is not None:
        post(os.environ["SLIMRL_REWARD_URL"], reward_key, {"reward": REWARD})


if __name__ == "__main__":
    main()
