"""Statistics of a rollout for metrics.jsonl."""

from collections.abc import Mapping, Sequence

import numpy as np

from slimrl.data.trajectory import ACCEPTED_DRAFT_TOKENS, DRAFT_TOKENS, STALE_CACHE_TOKENS, Status, Trajectory
from slimrl.engines.teacher import ScoringTimes


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Metrics of scored trajectories that took `seconds` to generate.

    `rollout/tool_error_fraction` and `rollout/malformed_call_fraction` are of tool calls (0 if there were none); the
    other fractions are of trajectories.
    Failed trajectories have no reward and do not count in `reward/mean` and `reward/parts`.
    """
    scored = [t for t in trajectories if t.status is not Status.failed]
    parts = sorted({name for t in scored for name in t.rewards})
    by_turn = any(t.turn_rewards for t in scored)
    tokens = sum(t.num_sampled_tokens for t in trajectories)
    calls = sum(t.metadata["num_tool_calls"] for t in trajectories)
    errors = sum(t.metadata["num_tool_errors"] for t in trajectories)
    malformed = sum(t.metadata["num_malformed_calls"] for t in trajectories)
    subagents = [t.metadata.get("num_subagents", 0) for t in trajectories]
    compactions = [t.metadata.get("num_compactions", 0) for t in trajectories]
    stale, drafts, accepted = (
        sum(t.metadata.get(key, 0) for t in trajectories)
        for key in (STALE_CACHE_TOKENS, DRAFT_TOKENS, ACCEPTED_DRAFT_TOKENS)
    )
    return {
        "reward/mean": float(np.mean([t.reward for t in scored])) if scored else float("nan"),
        **{f"reward/parts/{name}": float(np.mean([t.rewards.get(name, 0.0) for t in scored])) for name in parts},
        **({"reward/turns": float(np.mean([sum(t.turn_rewards) for t in scored]))} if by_turn else {}),
        **_by_role(scored),
        "reward/timeouts": sum(bool(t.metadata.get("reward_timed_out")) for t in trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/tokens": tokens,
        "rollout/tokens_per_s": tokens / seconds,
        "rollout/turns_mean": _mean(trajectories, "num_turns"),
        "rollout/truncated_fraction": _fraction(trajectories, Status.truncated),
        "rollout/aborted_fraction": _fraction(trajectories, Status.aborted),
        "rollout/failed_fraction": _fraction(trajectories, Status.failed),
        "rollout/tool_error_fraction": errors / calls if calls else 0.0,
        "rollout/malformed_call_fraction": malformed / calls if calls else 0.0,
        **({"rollout/stale_cache_tokens": stale} if stale else {}),
        **({"rollout/draft_accept_rate": accepted / drafts} if drafts else {}),
        "rollout/retries": sum(t.metadata["num_retries"] for t in trajectories),
        **({"rollout/subagents_mean": float(np.mean(subagents))} if any(subagents) else {}),
        **({"rollout/compactions_mean": float(np.mean(compactions))} if any(compactions) else {}),
    }


def _by_role(scored: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/role/<role>` of each role that is trained."""
    roles = sorted({role for t in scored for role in t.role_rewards})
    return {
        f"reward/role/{role}": float(np.mean([t.role_rewards[role] for t in scored if role in t.role_rewards]))
        for role in roles
    }


def source_metrics(trajectories: Sequence[Trajectory], sources: Mapping[str, str]) -> dict[str, float]:
    """`reward/source/<source>` of each source of which a trajectory is scored; as `reward/mean`.

    Args:
        sources: of each prompt, by its id.
    """
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.status is not Status.failed:
            rewards.setdefault(sources[trajectory.group_id], []).append(trajectory.reward)
    return {f"reward/source/{source}": float(np.mean(values)) for source, values in sorted(rewards.items())}


def teacher_metrics(trajectories: Sequence[Trajectory], times: ScoringTimes) -> dict[str, float]:
    """Metrics of the teacher's scores; empty if no sampled token has one.

    `distill/reverse_kl` is the mean of log pi - log pi_teacher over the sampled tokens, an unbiased estimate of the
    reverse KL by token (k1; http://joschu.net/blog/kl-approx.html).
    """
    total, tokens = 0.0, 0
    for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
        if segment.teacher_logprobs is not None:
            gap_T = np.where(segment.loss_mask, segment.rollout_logprobs - segment.teacher_logprobs, 0)
            total += float(gap_T.sum(dtype=np.float64))
            tokens += int(segment.loss_mask.sum())
    if not tokens:
        return {}
    # The groups of a batch may have waited since before the last one, or the last start of the run.
    scores = {"distill/score_s": float(np.mean(times.scores_s))} if times.scores_s else {}
    tail = {"time/teacher_s": sum(times.tails_s)} if times.tails_s else {}
    return {"distill/reverse_kl": total / tokens, **scores, **tail}


def _mean(trajectories: Sequence[Trajectory], key: str) -> float:
    return float(np.mean([t.metadata[key] for t in trajectories]))


def _fraction(trajectories: Sequence[Trajectory], status: Status) -> float:
    return sum(t.status is status for t in trajectories) / len(trajectories)
