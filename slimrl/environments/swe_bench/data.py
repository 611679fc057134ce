"""Prompt files of a published data set of SWE-bench (arXiv:2310.06770), which the user has downloaded.

The data sets of SWE-bench 5 (SWE-bench, Verified, Lite, Multilingual) name the image and hold the eval script of each
task, in columns beside those of older ones. `images.txt` lists the images, which the user pulls.
"""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import write_lines
from slimrl.environments.swe_bench import package
from slimrl.environments.swe_bench.counted import touched

IMAGES = "images.txt"
COLUMNS = ("instance_id", "problem_statement", "base_commit", "patch", "test_patch", *package.NEEDED[1:])


def write(out: Path, *, num: int, heldout: int, seed: int, dataset: str = "") -> None:
    """Write train.jsonl, heldout.jsonl and images.txt.

    Args:
        num: number of training tasks.
        heldout: number of held-out tasks.
        dataset: the file, `.jsonl`, `.json` (a list) or `.parquet`.

    Raises:
        ValueError: there is no such file, it is no data set of SWE-bench 5, or it has too few tasks.
    """
    if not dataset:
        raise ValueError("dataset: which file? Download a data set of SWE-bench and give --set dataset=FILE")
    file = Path(dataset)
    lines = [_line(instance, where) for where, instance in _instances(file) if not instance.get("image_assets")]
    if len(lines) < num + heldout:
        raise ValueError(
            f"{file} has {len(lines)} tasks without images that would have to be fetched for them, and "
            f"{num} + {heldout} are asked for"
        )
    names = [line["id"] for line in lines]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: {next(name for name in names if names.count(name) > 1)} occurs more than once")
    random.Random(seed).shuffle(lines)
    chosen = {"heldout": lines[:heldout], "train": lines[heldout : heldout + num]}
    for name, tasks in chosen.items():
        write_lines(out / f"{name}.jsonl", tasks)
    images = sorted({task["metadata"]["image"] for tasks in chosen.values() for task in tasks})
    (out / IMAGES).write_text("".join(f"{image}\n" for image in images))


def _line(instance: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The line of a prompt file."""
    if missing := [name for name in COLUMNS if not instance.get(name) and name != "PASS_TO_PASS"]:
        older = " It is of before SWE-bench 5: download the present one." if "eval_script" in missing else ""
        raise ValueError(f"{where}: no {', '.join(missing)}.{older}")
    if instance["log_parser"] not in package.known_parsers():
        raise ValueError(f"{where}: swebench 5.0.2 has no {instance['log_parser']}")
    metadata = {
        **package.task_of(instance),
        "base_commit": instance["base_commit"],
        "patch": instance["patch"],
        "test_files": touched(instance["test_patch"]),
    }
    return {
        "id": instance["instance_id"],
        "prompt": instance["problem_statement"],
        "label": None,
        "metadata": metadata,
    }


def _instances(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a data set, each with its place."""
    if not file.is_file():
        raise ValueError(f"dataset: there is no file {file}")
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(file).to_pylist()
        elif file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        elif file.suffix == ".json":
            rows = json.loads(file.read_text())
        else:
            raise ValueError(f"dataset: {file} is neither .jsonl, .json nor .parquet")
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        where = f"{file}: task {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object")
        yield where, row
