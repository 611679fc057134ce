"""evaluation.json: what an evaluation is of, so that nothing else goes on in its folder or is compared with it.

It has the checkpoint's path and the checksums of its files, the settings on which items depend, and of each set the
number and a checksum of its prompts.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.base.atomic import write_whole
from slimrl.base.visible import visible
from slimrl.config.load import is_needed
from slimrl.config.show import changed_settings
from slimrl.data.prompt import Prompt

NO_EFFECT = (
    *("run", "resync", "checkpoint", "tracking", "data", "model.path", "model.megatron"),
    *("reward.group", "reward.group_filters", "reward.retries", "reward.retry_on", "reward.startup_timeout_s"),
    "reward.alarm_steps",
    *(
        "agent.past_versions",
        "agent.workers",
        "agent.sandbox.all_nodes",
        "agent.sandbox.max_running",
        "agent.sandbox.max_waiting",
    ),
    *("agent.sandbox.max_sessions", "agent.gateway"),
    *("eval.every_steps", "eval.at_start", "eval.at_end", "eval.pass_at", "eval.pass_reward"),
    *("rollout.sampling", "rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.colocated"),
    *("rollout.num_engines", "rollout.threads_per_engine", "rollout.max_concurrency_per_engine"),
    *("rollout.max_failed_fraction", "rollout.max_replacements", "rollout.startup_timeout_s"),
)
"""Settings and sections on which no item depends, of those that `slimrl eval` reads, and those with checksums."""

CHECKPOINT_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Files of a checkpoint that make the model, its tokenizer and its chat template."""


def describe(
    settings: Mapping[str, Any], checkpoint: Path, checksums: Mapping[str, str], sets: Mapping[str, Sequence[Prompt]]
) -> dict[str, Any]:
    """The record of an evaluation.

    Args:
        settings: the resolved recipe, nested.
        checksums: of the checkpoint's files by their names.
        sets: prompts of each evaluation set.
    """
    record = {
        "checkpoint": {"path": str(checkpoint), "checksums": dict(checksums)},
        "settings": _with_effect(settings),
        "pass_at": settings["eval"]["pass_at"],
        "pass_reward": settings["eval"]["pass_reward"],
        "sets": {name: {"num_prompts": len(prompts), "sha256": _digest(prompts)} for name, prompts in sets.items()},
    }
    # As it will be read.
    return dict(json.loads(json.dumps(record)))


def checkpoint_files(checkpoint: Path) -> list[str]:
    """Names of the files that identify a checkpoint."""
    return sorted(path.name for path in checkpoint.iterdir() if path.suffix in CHECKPOINT_SUFFIXES and path.is_file())


def open_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record, or compare it with the one that is there.

    Raises:
        ValueError: the one that is there is of another evaluation; names every difference.
    """
    if path.is_file():
        differences = list(_differences(read_record(path), record))
        if differences:
            raise ValueError(
                f"{path} is of another evaluation:\n"
                + "".join(f"  {difference}\n" for difference in differences)
                + f"Evaluate as there to continue it, or give another --out than {path.parent}."
            )
    write_whole(path, visible(json.dumps(record, indent=2, ensure_ascii=False)) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file is no record."""
    try:
        record = json.loads(path.read_text())
        for key in ("settings", "sets", "pass_at", "pass_reward"):
            record[key]
        record["checkpoint"]["checksums"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the record of an evaluation: {error!r}") from error
    return record


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = (record["checkpoint"]["checksums"] for record in (before, now))
    if files := [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]:
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        paths = (record["checkpoint"]["path"] for record in (before, now))
        yield f"--checkpoint: {' -> '.join(paths)}, which differ in {shown}"
    yield from changed_settings(before["settings"], now["settings"])
    for name in sorted({*before["sets"], *now["sets"]}):
        if before["sets"].get(name) != now["sets"].get(name):
            counts = (record["sets"].get(name, {}).get("num_prompts", 0) for record in (before, now))
            yield f"data.eval.{name}: other prompts ({' -> '.join(map(str, counts))})"


def _with_effect(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings on which items depend, nested."""
    kept = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if is_needed(key, "eval") and key not in NO_EFFECT:
            kept[name] = _with_effect(value, f"{key}.") if isinstance(value, dict) else value
    return kept


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        line = [prompt.prompt_id, prompt.messages, prompt.label, prompt.metadata]
        digest.update((json.dumps(line, sort_keys=True, default=str) + "\n").encode())
    return digest.hexdigest()
