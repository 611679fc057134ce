"""Whether a run is running, complete or ended otherwise, and why; how long it took, on what."""

import json
import re
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from slimrl.base.folder_lock import holder_of
from slimrl.observability.now_file import read_now
from slimrl.observability.run_files import Run

_ENDED = re.compile(r" (?:ERROR|INFO) slimrl\.cli\.exit_codes: (?:failed: )?")
"""Begin of the line of logs/driver.log that says why a command ended"""
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", re.MULTILINE)
LONGEST_CAUSE = 4_000
"""Largest number of characters of a cause that are shown"""
LOG_END_BYTES = 1 << 20
"""Bytes at the end of logs/driver.log in which the cause is looked for"""
MODEL_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
)
"""Fields of a Hugging Face config that say what kind of model it is"""


def state(run: Run) -> dict[str, Any]:
    """`word`, `step` of `steps`, `cause` (empty if there is none to tell), `log` (the end of logs/driver.log)."""
    steps = int(run.settings.get("steps") or run.last_step)
    holder = holder_of(run.folder.path)
    cause = _cause(run)
    if holder is not None:
        word, cause = "running" if run.steps else "starting", f"in use by {holder}"
    elif run.folder.requeue.is_file():
        word = "preempted"
    elif run.folder.ended_early.is_file():
        word = "ended before its first step"
    elif (now := read_now(run.folder.now)) is not None:
        word, cause = "ended early", f"not running: it was killed, {now.said}"
    elif run.last_step >= steps:
        word, cause = "complete", ""
    elif cause:
        word = "failed"
    else:
        word = "ended early"
    return {"word": word, "step": run.last_step, "steps": steps, "cause": cause, "log": _log_end(run)[-8_000:]}


def _log_end(run: Run) -> str:
    path = run.folder.log_file("driver")
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_END_BYTES))
        return file.read().decode(errors="replace")


def _cause(run: Run) -> str:
    """What the newest start said when it ended; empty if it said nothing, as after SIGKILL."""
    log = _log_end(run)
    begins = [one.start() for one in _RECORD.finditer(log)]
    records = [log[begin:end] for begin, end in pairwise([*begins, len(log)])]
    began = run.starts[-1]["time"] if run.starts else ""
    for record in reversed(records):
        if (found := _ENDED.search(record)) is not None and _utc(record) >= began:
            return record[found.end() :].strip()[:LONGEST_CAUSE]
    return ""


def _utc(record: str) -> str:
    """The time of a record, which is local time, as provenance.json writes it."""
    return datetime.fromisoformat(record[:19]).astimezone(UTC).isoformat(timespec="seconds")


def duration(run: Run) -> dict[str, Any]:
    """`begun` and `last` (of the newest metrics, null before the first), `steps_s` (sum of its steps) and `eval_s` (sum
    of evaluations)."""
    last = datetime.fromtimestamp(run.folder.metrics.stat().st_mtime, UTC) if run.steps else None
    return {
        "begun": run.starts[0]["time"] if run.starts else None,
        "last": last.isoformat(timespec="seconds") if last else None,
        "starts": len(run.starts),
        "steps_s": sum(line.get("time/step_s") or 0.0 for line in run.steps),
        "eval_s": sum(line.get("time/eval_s") or 0.0 for line in run.steps),
    }


def model(run: Run) -> dict[str, Any]:
    """The model's path, and what its config says of it where it is on this machine."""
    path = str(run.settings.get("model.path", ""))
    for folder in (run.folder.export, Path(path)):
        if (file := folder / "config.json").is_file():
            config = json.loads(file.read_text())
            return {"path": path, **{name: config[name] for name in MODEL_FIELDS if name in config}}
    return {"path": path}


def machine(run: Run) -> dict[str, Any]:
    """Versions and hardware of the newest start, its command and commit."""
    if not run.starts:
        return {}
    start = run.starts[-1]
    return {name: start.get(name) for name in ("command", "git", "packages", "python", "platform", "host")}
