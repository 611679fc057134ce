"""A folder of a run with everything that the page of runs shows, and texts that would do harm as markup."""

import json
from pathlib import Path

import numpy as np
import yaml

from slimrl.data.token_values import TokenValues
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.observability.expert_load import write_expert_load
from slimrl.observability.recorded_trajectories import Recorded, write_recorded
from slimrl.observability.run_folder import RunFolder

HOSTILE = (
    "<script>window.harmed=1</script>",
    "</script><script>window.harmed=1</script><!--",
    '<img src=x onerror="window.harmed=1">',
    "<svg/onload=window.harmed=1>",
    '"><iframe srcdoc="<script>parent.harmed=1</script>">',
    "{{ 7 * 7 }} ${7*7} {% raw %}",
    "\u202eright to left\u202c and \u2028 a line, \x1b[31m a colour, \x00 a null, \ud800 a half",
)
WORDS = ("play", " the", " game", "</script>", "<b>", "\n", " open", " box", "\u202e", " key")
"""Texts of the tokens 0 to 9"""
STEPS = 3


def decode(tokens) -> str:
    return "".join(WORDS[token % len(WORDS)] for token in tokens)


def metrics(step: int, seed: int) -> dict[str, float | None]:
    return {
        "step": step,
        "reward/mean": 0.1 * step + 0.01 * seed,
        "reward/parts/<img src=x onerror=window.harmed=1>": 0.5,
        "eval/heldout/accuracy": 0.25 * step,
        "eval/heldout/stderr/accuracy": None if step == 2 else 0.1,
        "policy/entropy": 1.0 / (step + 1),
        "policy/grad_norm": None if step == 2 else 0.3,
        "policy/kl": 10.0**-step,
        "mismatch/logprob_abs_mean": 1e-6,
        "resync/replaced_engines": 1 if step == 2 else 0,
        "time/rollout_s": 2.0 * step,
        "time/train_s": 1.0,
        "time/other_s": 0.5,
        "time/eval_s": 0.7,
        "time/step_s": 2.0 * step + 1.5,
    }


def make_trajectory(step: int, group: int, member: int, num_tokens: int) -> tuple[Trajectory, dict[str, np.ndarray]]:
    rng = np.random.default_rng([step, group, member])
    mask_T = np.arange(num_tokens) >= num_tokens // 3
    segment = Segment(
        tokens=rng.integers(0, len(WORDS), num_tokens).astype(np.int32),
        loss_mask=mask_T,
        rollout_logprobs=np.where(mask_T, -rng.exponential(1.0, num_tokens), 0.0).astype(np.float32),
        weight_versions=np.where(mask_T, step - 1, -1).astype(np.int32),
        turn_ids=np.where(mask_T, 0, -1).astype(np.int16),
    )
    call = {"id": "call_0", "type": "function", "function": {"name": "look<b>", "arguments": {"at": HOSTILE[0]}}}
    trajectory = Trajectory(
        group_id=f"group {group} {HOSTILE[2]}",
        trajectory_id=f"step_{step:06d}/{group:05d}/{member:03d}",
        segments=[segment],
        status=Status.completed if member else Status.truncated,
        reward=float(member % 2),
        messages=[
            {"role": "user", "content": HOSTILE[member % len(HOSTILE)]},
            {"role": "assistant", "content": f"<think>{HOSTILE[1]}</think>{HOSTILE[3]}", "tool_calls": [call]},
            {"role": "tool", "name": HOSTILE[0], "content": HOSTILE[6]},
        ],
        metadata={"num_turns": 1, "num_tool_errors": member, "num_prompt_messages": 1},
    )
    num_sampled = int(mask_T[1:].sum())
    engine_S = segment.rollout_logprobs[1:][mask_T[1:]]
    ratio_S = np.exp(rng.normal(0, 0.1, num_sampled))
    found = {
        "trainer_logprobs": engine_S + rng.normal(0, 0.01, num_sampled),
        "advantages": np.full(num_sampled, member % 2 - 0.5),
        "ratios": ratio_S,
        "clipped": (np.abs(ratio_S - 1) > 0.1).astype(float),
        "entropies": rng.exponential(0.5, num_sampled),
    }
    return trajectory, found


def make_run(folder: Path, *, seed: int = 0, groups: int = 2, members: int = 4, num_tokens: int = 60) -> RunFolder:
    """Write a run of STEPS steps, continued once, with recorded trajectories, readable samples and experts' loads."""
    run = RunFolder(folder)
    run.logs.mkdir(parents=True)
    run.trajectories.mkdir()
    settings = {
        "seed": seed,
        "steps": STEPS,
        "run": {"name": folder.name, "dir": str(folder.parent)},
        "model": {"path": str(folder.parent / "model")},
        "algorithm": {"max_logprob_mismatch": 1e-4},
        "trainer": {"optimizer": {"clip_grad": 1.0}},
    }
    run.config.write_text(yaml.safe_dump(settings))
    start = {
        "time": "2026-01-01T00:00:00+00:00",
        "command": ["slimrl", "train", "recipes/tiny/<b>.yaml", f"seed={seed}"],
        "git": {"commit": "0" * 40, "dirty": False},
        "packages": {"torch": "2.0"},
        "python": "3.12",
        "platform": "Linux",
        "host": {"name": "<b>host</b>", "cpus": 2},
        "config_origins": {
            "seed": "command line",
            "steps": "recipes/tiny/<b>.yaml:3",
            "model.path": "recipes/a.yaml:1",
        },
    }
    run.provenance.write_text(json.dumps([start, {**start, "time": "2026-01-01T01:00:00+00:00"}]))
    run.metrics.write_text("".join(json.dumps(metrics(step, seed)) + "\n" for step in range(1, STEPS + 1)))
    times = {1: 1767225600.0, 2: 1767229200.0 + 5, 3: 1767229200.0 + 60}
    run.groups.write_text("".join(json.dumps({"step": step, "begun": at}) + "\n" for step, at in times.items()))
    for step in range(1, STEPS + 1):
        made = [
            make_trajectory(step, group, member, num_tokens) for group in range(groups) for member in range(members)
        ]
        values = TokenValues([trajectory for trajectory, _ in made])
        for trajectory, found in made:
            values.add(trajectory.segments[0], found)
        recorded = Recorded(
            step=step,
            values=values,
            sources={trajectory.group_id: "source <i>" for trajectory, _ in made},
            labels={trajectory.group_id: HOSTILE[0] for trajectory, _ in made},
            advantages={trajectory.trajectory_id: trajectory.reward - 0.5 for trajectory, _ in made},
        )
        write_recorded(run.trajectories / f"step_{step:06d}.parquet", recorded, decode)
        write_expert_load(run.expert_load_file(step), step, {0: np.array([step, 1, 2, 1]), 2: np.array([0, 4, 0, 0])})
    return run
