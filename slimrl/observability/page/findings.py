"""What in a run's metrics asks for a look, by the rows of docs/debugging.md.

RULES has those rows of that page that metrics alone decide, in its words, since an installed slimrl has no docs; a test
compares the two.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slimrl.observability.run_files import Run

WINDOW = 5
"""Number of the newest values of a metric whose mean is judged; changes are from the mean of as many first values"""


@dataclass(frozen=True)
class Sign:
    metric: str
    """Name of the metric; `<set>` and `<ladder>` are any name"""
    kind: Literal["above", "below", "rose", "fell"]
    """Whether the newest mean is beyond `limit`, or has become at least `limit` times as large, or as small"""
    limit: float
    setting: str = ""
    """Setting that multiplies `limit`; where it has no number, the sign is never there"""


@dataclass(frozen=True)
class Rule:
    signs: tuple[Sign, ...]
    """All must be there; the first names the curve to look at"""
    section: str
    """Heading of docs/debugging.md"""
    cause: str
    advice: str


RULES = (
    Rule(
        (Sign("reward/mean", "below", 1e-9), Sign("rollout/zero_variance_fraction", "above", 0.99)),
        "The reward stays at 0",
        "the policy learned nothing, since all groups have zero variance",
        "read some of trajectories/step_000001.jsonl",
    ),
    Rule(
        (Sign("rollout/truncated_fraction", "above", 0.8),),
        "The reward stays at 0",
        "answers are cut before they end",
        "rollout.sampling.max_new_tokens, rollout.max_trajectory_tokens, rollout.max_turns; algorithm.truncated: score",
    ),
    Rule(
        (Sign("rollout/malformed_call_fraction", "above", 0.3),),
        "The reward stays at 0",
        "calls are not in the parser's format, or the model was never shown the tools",
        "slimrl inspect-chat RECIPE; agent.parser, agent.tool_prompt",
    ),
    Rule(
        (Sign("rollout/tool_error_fraction", "above", 0.3),),
        "The reward stays at 0",
        "tools refuse what the model asks, or fail themselves",
        "the texts of the errors in trajectories/; the tool's docstring where calls are wrong",
    ),
    Rule(
        (Sign("reward/timeouts", "above", 0.0),),
        "The reward stays at 0",
        "answers that cannot be judged in time count as wrong",
        "simpler forms of answers, in the system prompt",
    ),
    Rule(
        (Sign("rollout/zero_variance_fraction", "above", 0.8), Sign("eval/<set>/accuracy", "above", 0.95)),
        "The reward is at 1",
        "it is solved",
        "harder data; algorithm.dynamic_sampling.refill: order replaces what is solved",
    ),
    Rule(
        (Sign("reward/hacking_alarm", "above", 0.0),),
        "The reward is at 1",
        "the reward can be had for less",
        "reward/parts/<part> shows which part; reward/hacking_alarm counts proxies that rise while verified parts fall "
        "(reward.parts.NAME.verified); lower reward.parts.NAME.weight or set reward.parts.NAME.cap",
    ),
    Rule(
        (Sign("train/skipped_steps", "rose", 1.0),),
        "The reward does not move",
        "losses or gradients that are not finite",
        "the terminal names their trajectories, logs/driver.log has their numbers",
    ),
    Rule(
        (Sign("policy/clip_fraction", "above", 0.9),),
        "The reward does not move",
        "a clip range of another algorithm, or much too old samples",
        "algorithm.clip_low, algorithm.clip_high: GSPO's are a thousandth of GRPO's; async/age_mean",
    ),
    Rule(
        (Sign("policy/grad_norm", "above", 10.0, "trainer.optimizer.clip_grad"),),
        "The reward does not move",
        "each step is cut to the same length",
        "trainer.optimizer.lr",
    ),
    Rule(
        (Sign("rollout/zero_variance_fraction", "above", 0.8),),
        "The reward does not move",
        "few groups teach anything, and the means count all of them",
        "algorithm.dynamic_sampling.refill: order",
    ),
    Rule(
        (Sign("critic/explained_variance", "below", 0.05),),
        "The reward does not move",
        "the critic knows nothing yet",
        "critic.warmup_steps, critic.trainer.optimizer.lr",
    ),
    Rule(
        (Sign("policy/effective_sample_size", "below", 0.5),),
        "The reward does not move",
        "samples of another policy",
        "rollout.max_staleness down; the mismatch of trainer and engines",
    ),
    Rule(
        (Sign("mismatch/logprob_abs_mean", "above", 0.5, "algorithm.max_logprob_mismatch"),),
        "Trainer and engines disagree",
        "engines and trainer do not compute the same function: another precision, a template, a kernel",
        "trainer.precision: fp32 with small models brings it to 1e-6 or shows a fault",
    ),
    Rule(
        (Sign("mismatch/logprob_abs_mean", "rose", 10.0),),
        "Trainer and engines disagree",
        "an engine has kept older weights, which resync.verify: off lets pass, or the policy has moved to where "
        "rounding counts more",
        "resync.verify: full; sort the trajectories of the page by their largest gap: those of one engine stand "
        "together",
    ),
    Rule(
        (Sign("resync/fingerprint_mismatches", "above", 0.0),),
        "Trainer and engines disagree",
        "engines hold other weights than the trainer",
        "the run stops by itself; report it",
    ),
    Rule(
        (Sign("mismatch/far_fraction", "above", 0.0),),
        "Trainer and engines disagree",
        "one kind of token, such as the end of a turn",
        "slimrl inspect-chat RECIPE; sort the trajectories of the page by their largest gap",
    ),
    Rule(
        (Sign("rollout/stale_cache_tokens", "above", 0.0),),
        "Trainer and engines disagree",
        "keys and values of older weights",
        "resync.flush_cache: true",
    ),
    Rule(
        (Sign("policy/entropy", "fell", 5.0),),
        "The entropy collapses",
        "the policy forgets what it could do with more tries",
        "algorithm.clip_high above algorithm.clip_low, as in DAPO; algorithm.entropy_target, or algorithm.entropy_coef",
    ),
    Rule(
        (Sign("policy/entropy", "rose", 3.0),),
        "The entropy collapses",
        "samples of negative advantage push the policy anywhere",
        "algorithm.dual_clip, algorithm.kl_coef, algorithm.correction.level: token",
    ),
    Rule(
        (Sign("resync/replaced_engines", "above", 0.0),),
        "Engines die",
        "an engine ended, hung or failed in a resync",
        "the cause from the engine's log",
    ),
    Rule(
        (Sign("rollout/failed_fraction", "above", 0.0),),
        "Trajectories fail",
        "a tool or an environment raised",
        "trajectories/failed.jsonl has the conversation, logs/driver.log the traceback",
    ),
    Rule(
        (Sign("rollout/aborted_fraction", "above", 0.0),),
        "Trajectories fail",
        "a deadline",
        "rollout.trajectory_timeout_s; slow tools",
    ),
    Rule(
        (Sign("rollout/retractions", "above", 0.0),),
        "Out of memory",
        "a full KV cache is no error; requests are retracted and computed again",
        "rollout.max_concurrency_per_engine down, or rollout.adaptive_concurrency: true",
    ),
    Rule(
        (Sign("time/loop_lag_max_s", "above", 2.0),),
        "A hang",
        "code of a tool, an environment or a reward that blocks the event loop",
        "await it, or agent.workers",
    ),
    Rule(
        (Sign("time/loop_lag_p99_s", "above", 0.05),),
        "Slow tools",
        "tools that compute on the event loop",
        "asyncio.to_thread, or agent.workers",
    ),
)
"""In the order in which a run is looked at"""


def findings(run: Run) -> list[dict[str, Any]]:
    """The rows that apply: `metric` (its name in the run), `value`, `says`, `section`, `cause`, `advice`."""
    found = []
    for rule in RULES:
        seen = [_seen(sign, run) for sign in rule.signs]
        if all(one is not None for one in seen):
            name, value, says = next(one for one in seen if one is not None)
            found.append(
                {
                    "metric": name,
                    "value": value,
                    "says": says,
                    "section": rule.section,
                    "anchor": rule.section.lower().replace(" ", "-"),
                    "cause": rule.cause,
                    "advice": rule.advice,
                }
            )
    return found


def _seen(sign: Sign, run: Run) -> tuple[str, float, str] | None:
    """(metric, newest mean, what is said of it) of the first metric of that name that is as the sign says."""
    factor = run.settings.get(sign.setting) if sign.setting else 1.0
    if not isinstance(factor, int | float):
        return None
    limit = sign.limit * factor
    pattern = re.sub("<[a-z]+>", "[^/]+", sign.metric)
    for name in sorted({name for line in run.steps for name in line if re.fullmatch(pattern, name)}):
        values = [line[name] for line in run.steps if line.get(name) is not None]
        first, last = _mean(values[:WINDOW]), _mean(values[-WINDOW:])
        match sign.kind:
            case "above":
                is_there, says = last > limit, f"{last:.3g}, above {limit:.3g}"
            case "below":
                is_there, says = last < limit, f"{last:.3g}, below {limit:.3g}"
            case "rose":
                is_there, says = last > limit * first, f"rose from {first:.3g} to {last:.3g}"
            case "fell":
                is_there, says = last * limit < first, f"fell from {first:.3g} to {last:.3g}"
        if values and is_there:
            return name, last, says
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
