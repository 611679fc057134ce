"""Two thousand mutated data files of every kind: each is one refusal with file and line, or is read as what it says.

What a file of lines says is read once more by `json.loads`. A compressed file has a checksum, so that any change of its
content is refused. Parquet need not have one: there a changed value within whole pages cannot be known.
"""

import gzip
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_file_mutations import damaged, mutated_lines
from slimrl_tools.toy.calculator_data import write_calculator_data

from slimrl.data.prompts import read_conversations, read_prompts
from slimrl.data.trajectory import Segment, Status, Trajectory, read_trajectories, to_json

CPU_LIMIT_S = 2.0
LONGEST = 2000
SHOWN = 25
"""Lines of a refusal at the most: twenty broken ones are listed, and their number"""


def trajectory_lines() -> list[bytes]:
    rng, lines = np.random.default_rng(0), []
    for number in range(4):
        length = 6 + number
        segment = Segment(
            tokens=rng.integers(0, 1000, length, np.int32),
            loss_mask=np.arange(length) > 2,
            rollout_logprobs=np.where(np.arange(length) > 2, -0.5, 0).astype(np.float32),
            weight_versions=np.where(np.arange(length) > 2, 3, -1).astype(np.int32),
            turn_ids=np.where(np.arange(length) > 2, 0, -1).astype(np.int16),
        )
        trajectory = Trajectory(
            group_id=f"g{number // 2}", trajectory_id=f"t{number}", segments=[segment], status=Status.completed,
            reward=0.5 * number, rewards={"format": 1.0}, turn_rewards=[0.25],
            messages=[{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "3"}],
            metadata={"num_turns": 1, "tool_calls": {"add": {"calls": 1, "errors": 0, "malformed": 0}}},
        )  # fmt: skip
        lines.append(json.dumps(to_json(trajectory)).encode())
    return lines


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """Kind -> the lines of a whole file."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    write_calculator_data(folder, seed=0, num_train=6, num_heldout=2, num_conversations=4)
    names = {"prompts": "train.jsonl", "conversations": "sft.jsonl"}
    files = {kind: (folder / name).read_bytes().splitlines() for kind, name in names.items()}
    return {"trajectories": trajectory_lines(), **files}


READERS: dict[str, Callable[[Path], list[Any]]] = {
    "trajectories": read_trajectories,
    "prompts": read_prompts,
    "conversations": read_conversations,
}


def refusal_of(kind: str, file: Path, content: bytes, about: str) -> tuple[str, list[Any]]:
    """What is said of a file that is refused, or else what is read."""
    file.write_bytes(content)
    started = time.process_time()
    try:
        return "", READERS[kind](file)
    except ValueError as error:
        said = str(error)
        assert str(file) in said, f"{about}: {said}"
        assert len(said) < LONGEST, about
        assert said.count("\n") < SHOWN, about
        said.encode()
        return said, []
    finally:
        assert time.process_time() - started < CPU_LIMIT_S, about


@pytest.mark.parametrize(("kind", "number"), [("trajectories", 700), ("prompts", 350), ("conversations", 350)])
def test_a_mutated_file_is_refused_with_its_lines_or_read_as_it_says(
    lines: dict[str, list[bytes]], tmp_path: Path, kind: str, number: int
):
    file, refused = tmp_path / "mutant.jsonl", 0
    for mutant in range(number):
        content = mutated_lines(Random(f"{kind} {mutant}"), lines[kind])
        about = f"mutant {mutant} of {kind}: {content[:300]!r}"
        said, read = refusal_of(kind, file, content, about)
        if said:
            refused += 1
            assert_right_lines(said, file, content.split(b"\n"), lines[kind], about)
            continue
        values = [json.loads(line.removeprefix(b"\xef\xbb\xbf")) for line in content.split(b"\n") if line.strip()]
        assert len(values) == len(read), about
        for value, one in zip(values, read, strict=True):
            assert_reads_as(kind, value, one, about)
    assert number // 3 < refused < number


def assert_right_lines(said: str, file: Path, now: list[bytes], before: list[bytes], about: str) -> None:
    """A line that is named is there and is not one that was left as it was, unless two have the same id."""
    named = [int(one) for one in re.findall(re.escape(str(file)) + r":(\d+): ", said)]
    if not any(line.strip() for line in now):
        assert "the file has no lines" in said, about
        return
    assert named, f"{about}: {said}"
    for line in named:
        assert now[line - 1] not in before or "already in line" in said or "twice" in said, f"{about}: {said}"


def assert_reads_as(kind: str, value: dict[str, Any], read: Any, about: str) -> None:
    if kind == "trajectories":
        again = to_json(read)
        for name in value.keys() - {"segments"}:
            assert same(value[name], again[name]), about
        for one, other in zip(value["segments"], again["segments"], strict=True):
            assert all(same(field, other[name]) for name, field in one.items()), about
        return
    texts = [one.get("content") or "" for one in value["messages"]] if value.get("messages") else [value["prompt"]]
    assert [one.get("content") or "" for one in read.messages] == texts, about
    if kind == "prompts":
        assert same(value["label"], read.label), about


def same(one: Any, other: Any) -> bool:
    """Equal as JSON is written, numbers as 32-bit floats at the least."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, float) or isinstance(other, float):
        return one == other or np.float32(one) == np.float32(other) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_compressed_file_is_refused_or_holds_the_same(
    lines: dict[str, list[bytes]], tmp_path: Path, kind: str
):
    file, whole = tmp_path / "mutant.jsonl.gz", b"\n".join(lines[kind]) + b"\n"
    packed, refused = gzip.compress(whole, mtime=0), 0
    for mutant in range(100):
        content = damaged(Random(f"gzip {kind} {mutant}"), packed)
        said, read = refusal_of(kind, file, content, f"mutant {mutant} of {kind}")
        refused += bool(said)
        if not said:
            assert gzip.decompress(content) == whole
            assert len(read) == len(lines[kind])
    assert refused > 70


@pytest.mark.parametrize("kind", ["prompts", "conversations"])
def test_a_damaged_parquet_file_is_refused_or_has_all_rows(lines: dict[str, list[bytes]], tmp_path: Path, kind: str):
    rows = [json.loads(line) for line in lines[kind]]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "whole.parquet")
    packed, refused = (tmp_path / "whole.parquet").read_bytes(), 0
    for mutant in range(150):
        content = damaged(Random(f"parquet {kind} {mutant}"), packed)
        said, read = refusal_of(kind, tmp_path / "mutant.parquet", content, f"mutant {mutant} of {kind}")
        refused += bool(said)
        assert said or len(read) == len(rows)
    assert refused > 50
