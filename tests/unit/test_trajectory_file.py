"""Trajectory files: what is written is read back, and every broken line is named with what is wrong with it."""

import json
from typing import Any

import numpy as np
import pytest

from slimrl.data.trajectory import Segment, Status, Trajectory, read_trajectories, to_json, write_trajectories


def trajectory(trajectory_id: str, **changes: Any) -> Trajectory:
    segment = Segment(
        tokens=np.array([0, 1, 151_935], np.int32), loss_mask=np.array([False, True, True]),
        rollout_logprobs=np.array([0, -12.345678, -1e-7], np.float32),
        weight_versions=np.array([-1, 70_000, 4], np.int32),
        turn_ids=np.array([-1, 0, 300], np.int16), routed_experts=np.full((3, 2, 2), 383, np.int16),
    )  # fmt: skip
    given = {"group_id": "a", "segments": [segment], "status": Status.truncated, "reward": 0.5} | changes
    return Trajectory(trajectory_id=trajectory_id, **given)


def test_what_is_written_is_read_back(tmp_path):
    written = [trajectory("a/0"), trajectory("a/1", rewards={"format": 0.25}, metadata={"num_turns": 1})]
    write_trajectories(tmp_path / "t.jsonl", written)
    read = read_trajectories(tmp_path / "t.jsonl")
    assert list(map(to_json, read)) == list(map(to_json, written))
    assert [read[0].segments[0].tokens.dtype, read[0].segments[0].routed_experts.dtype] == [np.int32, np.int16]


BROKEN = [
    ({"segments": None}, "`segments` must be a list of objects"),
    ({"status": "finished"}, "`status` is 'finished'; known are completed, truncated, aborted, failed"),
    ({"rewrad": 1.0}, "`rewrad` is unknown"),
    ({"segments": [{"tokens": [1]}]}, "segments[0]: `loss_mask`, `rollout_logprobs`, `weight_versions`"),
    ({"tokens": ["x", 1, 2]}, "segments[0]: `tokens` is not a list of int32"),
    ({"tokens": 5}, "segments[0]: `tokens` is not a list"),
    ({"tokens": [1, 2]}, "segments[0]: segment: loss_mask has 3 entries, tokens has 2"),
]


def test_every_broken_line_is_named_with_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "t.jsonl"
    good = to_json(trajectory("a/0"))
    lines = [{name: value for name, value in good.items() if name != "segments"}]
    for change, _ in BROKEN:
        inside = {name: value for name, value in change.items() if name in good["segments"][0]}
        line = good | ({"segments": [good["segments"][0] | inside]} if inside else change)
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in [good, *lines]) + '{"group_id": \n')
    with pytest.raises(ValueError, match="9 broken lines") as caught:
        read_trajectories(path)
    _, *said = str(caught.value).splitlines()
    assert said[0] == f"{path}:2: not a trajectory: `segments` is missing"
    for number, (_, problem) in enumerate(BROKEN, 3):
        assert said[number - 2].startswith(f"{path}:{number}: not a trajectory: {problem}")
    assert said[8] == f"{path}:10: not JSON: Expecting value at column 13, the line's end"


def test_log_probs_of_a_teacher_are_kept_and_a_file_from_before_there_were_any_is_read(tmp_path):
    written = trajectory("a/0")
    written.segments[0].teacher_logprobs = np.array([0, -2.5, -1e-7], np.float32)
    write_trajectories(tmp_path / "t.jsonl", [written])
    (read,) = read_trajectories(tmp_path / "t.jsonl")
    assert read.segments[0].teacher_logprobs.dtype == np.float32
    np.testing.assert_array_equal(read.segments[0].teacher_logprobs, written.segments[0].teacher_logprobs)
    old = to_json(written)
    del old["segments"][0]["teacher_logprobs"]
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    assert read_trajectories(tmp_path / "old.jsonl")[0].segments[0].teacher_logprobs is None
    old["segments"][0]["teacher_logprobs"] = [0.0]
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    with pytest.raises(ValueError, match="teacher_logprobs has 1 entries, tokens has 3"):
        read_trajectories(tmp_path / "old.jsonl")


def test_a_file_without_lines_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"t\.jsonl: the file has no lines"):
        read_trajectories(tmp_path / "t.jsonl")


def test_what_belongs_to_turns_is_read_back_and_a_file_without_it_is_read_too(tmp_path):
    given = {
        "turn_rewards": [0.5] * 301,
        "turn_states": ["s"] * 301,
        "advantage": -0.25,
        "turn_advantages": [1.0] * 301,
    }
    write_trajectories(tmp_path / "t.jsonl", [trajectory("a/0", **given)])
    (read,) = read_trajectories(tmp_path / "t.jsonl")
    assert {name: getattr(read, name) for name in given} == given
    old = {name: value for name, value in to_json(trajectory("a/0")).items() if name not in given}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    (read,) = read_trajectories(tmp_path / "old.jsonl")
    assert (read.turn_rewards, read.turn_states, read.advantage, read.turn_advantages) == ([], [], None, [])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"turn_rewards": [1.0]}, "turn_rewards has 1 entries, and the trajectory 301 turns"),
        ({"turn_rewards": ["1"]}, "`turn_rewards` must be a list of numbers"),
        ({"turn_states": [1]}, "`turn_states` must be a list of texts"),
        ({"turn_advantages": 1}, "`turn_advantages` must be a list of numbers"),
        ({"advantage": "1"}, "`advantage` must be a number or null"),
    ],
)
def test_a_line_whose_turns_do_not_fit_is_broken(tmp_path, change, problem):
    (tmp_path / "t.jsonl").write_text(json.dumps(to_json(trajectory("a/0")) | change) + "\n")
    with pytest.raises(ValueError, match=problem):
        read_trajectories(tmp_path / "t.jsonl")
