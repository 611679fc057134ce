"""The newest of a run's readable samples, a few lines each."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from slimrl.base.visible import visible

MOST_SAMPLES = 4
_OF_EVALUATION = re.compile(r"eval_(\d+)_(.+)")


def newest_samples(trajectories: Path) -> tuple[str, list[dict[str, Any]]]:
    """Where the newest samples are from, such as `step 12`, and the first of them; none without any."""
    found = [*trajectories.glob("step_*.jsonl"), *trajectories.glob("eval_*.jsonl")]
    if not found:
        return "", []
    newest = max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    samples = []
    with newest.open(errors="replace") as file:
        for line in islice(file, MOST_SAMPLES):
            # The last line may be half written.
            if line.endswith("\n"):
                samples.append(json.loads(line))
    return _source(newest.stem), samples


def _source(stem: str) -> str:
    if (found := _OF_EVALUATION.fullmatch(stem)) is not None:
        return f"evaluation {found[2]} of step {int(found[1])}"
    return f"step {int(stem.removeprefix('step_'))}"


def answers_table(source: str, samples: list[dict[str, Any]], width: int, count: int) -> Table | None:
    """Reward, status, question and answer of the first samples, each text on at most two lines; None without any."""
    if not samples:
        return None
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("answers", style="bold"), Text(f"of {source}", style="dim"))
    for sample in samples[:count]:
        reward, room = sample.get("reward"), 2 * (width - 10)
        said = Text("failed" if reward is None else f"{reward:.3g}", style="green" if reward else "yellow")
        table.add_row(said, Text(asked(sample, room), style="dim"))
        table.add_row(Text(str(sample.get("status", "")), style="dim"), Text(answered(sample, room)))
    return table


def asked(sample: dict[str, Any], room: int) -> str:
    """The first message of a user, shortened to `room` characters."""
    return _shortened(next((_said(m) for m in sample["messages"] if m.get("role") == "user"), ""), room // 2)


def answered(sample: dict[str, Any], room: int) -> str:
    """The last message of the policy, shortened."""
    turns = [_said(message) for message in sample["messages"] if message.get("role") == "assistant"]
    return _shortened(turns[-1] if turns else "", room)


def _said(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    if calls := message.get("tool_calls"):
        text += " " + json.dumps(calls, ensure_ascii=False)
    # Before a line is measured
    return visible(text)


def _shortened(text: str, room: int) -> str:
    """On one line; of a long text begin and end."""
    text = " ".join(text.split())
    half = (room - 3) // 2
    return text if len(text) <= room else f"{text[:half]} … {text[-half:]}"
