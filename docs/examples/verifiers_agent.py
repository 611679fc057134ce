"""An agent for the gateway that plays one task of an environment of the `verifiers` library (0.4).

It runs where verifiers is installed, and does not import slimrl (docs/agents.md#verifiers):

    python verifiers_agent.py ENV --prompts > prompts.jsonl    # a line for each task
    python verifiers_agent.py ENV < line                       # plays it, and posts its reward

ENV is the `[env]` block of a configuration of verifiers, as JSON; a plain name is that of its taskset.
"""

import asyncio
import ctypes
import itertools
import json
import os
import sys
import urllib.request
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def environment(text: str) -> vf.Env:
    block = json.loads(text) if text.startswith("{") else {"taskset": {"id": text}}
    return load_environment(resolve_env_config(block))


def print_prompts(env: vf.Env) -> None:
    for number, task in enumerate(env.taskset):
        print(json.dumps({"prompt": task.data.prompt_text or f"task {number}", "label": None, "task": number}))


async def play(env: vf.Env, number: int) -> float:
    """The reward of an episode.

    Raises:
        SystemExit: the episode failed; the message is the cause.
    """
    task = next(itertools.islice(env.taskset, number, None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model="policy", sampling=vf.types.SamplingConfig())
    async with env.serving():
        episode = await env.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(trace.last_error for trace in episode.traces)]
        sys.exit(f"task {number} failed: {next(filter(None, errors), None)}")
    return sum(trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable)


def reward_key() -> str:
    """The key with which this process posts the reward; no other process may have it, so it is read first of all."""
    key = os.read(int(os.environ["SLIMRL_REWARD_FD"]), 100).decode().strip()
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: other processes of this user cannot read this one's memory
    return key


def post_reward(reward: float, key: str) -> None:
    request = urllib.request.Request(
        os.environ["SLIMRL_REWARD_URL"],
        json.dumps({"reward": reward}).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    # The server is on this machine's network: no proxy.
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def main() -> None:
    if "--prompts" in sys.argv:
        print_prompts(environment(sys.argv[1]))
        return
    key = reward_key()
    line: dict[str, Any] = json.load(sys.stdin)
    post_reward(asyncio.run(play(environment(sys.argv[1]), line["metadata"]["task"])), key)


if __name__ == "__main__":
    main()
