"""Trajectories as results of BFCL, which its own scorer reads: `bfcl evaluate --result-dir FOLDER --partial-eval`.

A result has the answers of the model by user turn and step: `[{name: arguments as JSON text}, ...]` for calls, text for
all else, which is what the package writes for a model that takes tools. A user turn that the policy did not finish is
left out, so that the scorer counts the entry as ended by force.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.environments.bfcl.later import CALL_LATER, names_added
from slimrl.environments.bfcl.python_calls import call_text

ENTRY_ID = r"multi_turn_[a-z_]+_\d+"


def write_results(trajectories_file: Path, out_folder: Path, model: str = "slimrl") -> list[Path]:
    """Write `result/<model>/multi_turn/BFCL_v4_<category>_result.json` for each category of a trajectory file.

    Args:
        trajectories_file: as `slimrl rollout --out` writes it, or the file of an evaluation.
        out_folder: that `result` is made in.
        model: the scorer only takes names of its own list, so use that of a model that takes tools.

    Returns:
        The files.

    Raises:
        ValueError: a line is no trajectory of BFCL, or a prompt has two of them.
    """
    by_category: dict[str, dict[str, dict[str, Any]]] = {}
    for number, line in enumerate(trajectories_file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        trajectory = json.loads(line)
        where, entry_id = f"{trajectories_file}:{number}", _entry_id(trajectory)
        if entry_id is None:
            raise ValueError(f"{where}: this is no trajectory of an entry of BFCL, such as multi_turn_base_0.")
        results = by_category.setdefault(entry_id.rsplit("_", 1)[0], {})
        if entry_id in results:
            raise ValueError(f"{where}: {entry_id} has a trajectory already. BFCL takes one sample for each prompt.")
        results[entry_id] = {"id": entry_id, "result": result_of(trajectory)}
    folder = out_folder / "result" / model.replace("/", "_") / "multi_turn"
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / f"BFCL_v4_{category}_result.json", results) for category, results in by_category.items()]


def result_of(trajectory: dict[str, Any]) -> list[list[Any]]:
    """The model's answers by user turn and step, of the user turns that it finished."""
    turns: list[list[Any]] = []
    added: set[str] = set()
    before = ""
    for message in trajectory["messages"]:
        if message["role"] == "user":
            added |= set(names_added(message["content"]))
            if before != "user":
                turns.append([])
        elif message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            turns[-1].append(_step(calls, added) if calls else message.get("content") or "")
        before = message["role"]
    return turns if trajectory["status"] == "completed" else turns[:-1]


def _step(calls: Sequence[dict[str, Any]], added: set[str]) -> list[dict[str, str]]:
    """The calls of a step, without those that the environment refused because of their arguments' names: the scorer
    evaluates these names."""
    step = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name == CALL_LATER and arguments.get("name") in added:
            name, arguments = arguments["name"], arguments.get("arguments")
        if isinstance(arguments, dict) and call_text(name, arguments) is not None:
            step.append({name: json.dumps(arguments)})
    return step


def _entry_id(trajectory: dict[str, Any]) -> str | None:
    """The id of the entry; None if the line is of another task."""
    found = str(trajectory.get("prompt_id") or trajectory.get("group_id") or "").rpartition("/")[2]
    return found if re.fullmatch(ENTRY_ID, found) and "messages" in trajectory and "status" in trajectory else None


def _write(path: Path, results: dict[str, dict[str, Any]]) -> Path:
    in_order = sorted(results.values(), key=lambda result: int(result["id"].rpartition("_")[2]))
    path.write_text("".join(json.dumps(result) + "\n" for result in in_order), encoding="utf-8")
    return path
