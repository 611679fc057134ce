"""Trajectories for tests of rewards."""

from typing import Any

import numpy as np

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory


def said(text: str | None, *, before: list[dict[str, Any]] = (), name="t", status=Status.completed, **metadata):
    """A trajectory that ends with the assistant's `text`, or without an answer of its own for None."""
    messages = [{"role": "user", "content": "q"}, *before]
    if text is not None:
        messages.append({"role": "assistant", "content": text})
    num_turns = max(1, sum(message["role"] == "assistant" for message in messages))
    counts = {
        "num_turns": num_turns,
        "num_tool_calls": 0,
        "num_tool_errors": 0,
        "num_malformed_calls": 0,
        "num_prompt_messages": 1,
    }
    return Trajectory(
        group_id="g", trajectory_id=name, segments=[sampled([0, 1, 2], [-0.5, -1.0])], status=status, messages=messages,
        metadata=counts | {"num_retries": 0} | metadata,
    )  # fmt: skip


def sampled(tokens: list[int], logprobs: list[float], turns: list[int] | None = None) -> Segment:
    """A segment whose last tokens, as many as there are log-probs, were sampled; `turns` are theirs."""
    count = len(tokens) - len(logprobs)
    return Segment(
        tokens=np.array(tokens, np.int32),
        loss_mask=np.arange(len(tokens)) >= count,
        rollout_logprobs=np.array([0.0] * count + logprobs, np.float32),
        weight_versions=np.zeros(len(tokens), np.int32),
        turn_ids=np.array([-1] * count + (turns or [0] * len(logprobs)), np.int16),
    )


def asked(label: Any = None, text: str = "q", **metadata: Any) -> Prompt:
    return Prompt(
        prompt_id="g", messages=[{"role": "user", "content": text}], label=label, metadata=metadata, source="p.jsonl:7"
    )
