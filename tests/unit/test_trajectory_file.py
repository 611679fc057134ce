"""Trajectory files: what is written is read back, and every broken line is named with what is wrong with it."""

import json
import random
from typing import Any

import numpy as np
import pytest
from json_paths import paths

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
    ({"tokens": ["x", 1, 2]}, "segments[0]: `tokens` must hold integers alone"),
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loss_mask": ["false", True, True]}, "`loss_mask` must hold true and false alone"),
        ({"loss_mask": [0, 1, 1]}, "`loss_mask` must hold true and false alone"),
        ({"tokens": [0, 1.7, 2]}, "`tokens` must hold integers alone"),
        ({"tokens": [0, True, 2]}, "`tokens` must hold integers alone"),
        ({"tokens": [0, -5, 2]}, "`tokens` must hold integers from 0 to 2147483647"),
        ({"tokens": [0, 2**31, 2]}, "`tokens` must hold integers from 0 to 2147483647"),
        ({"tokens": [0, 10**400, 2]}, "`tokens` has a number beyond 64 bits"),
        ({"tokens": [[0], [1], [2]]}, "`tokens` must hold integers alone"),
        ({"rollout_logprobs": [0, None, -1]}, "`rollout_logprobs` must hold numbers alone"),
        ({"rollout_logprobs": [0, float("nan"), -1]}, "`rollout_logprobs` must hold finite numbers of 32 bits"),
        ({"rollout_logprobs": [0, -1e39, -1]}, "`rollout_logprobs` must hold finite numbers of 32 bits"),
        ({"rollout_logprobs": [0, -(10**400), -1]}, "`rollout_logprobs` has a number beyond 64 bits"),
        ({"weight_versions": [-2, 0, 0]}, "`weight_versions` must hold integers from -1"),
        ({"turn_ids": [-1, 0, 40_000]}, "`turn_ids` must hold integers from -1 to 32767"),
        ({"routed_experts": [1, 2, 3]}, "`routed_experts` must be a list of lists of lists, of the same lengths"),
        ({"routed_experts": [[[1, 2]], [[1]], [[1, 2]]]}, "`routed_experts` must be a list of lists of lists"),
        ({"reward": "1"}, "`reward` must be a finite number, or NaN"),
        ({"reward": True}, "`reward` must be a finite number, or NaN"),
        ({"reward": float("inf")}, "`reward` must be a finite number, or NaN"),
        ({"reward": 10**400}, "`reward` must be a finite number, or NaN"),
        ({"rewards": {"format": None}}, "`rewards` must be an object of numbers"),
        ({"turn_rewards": [float("inf")]}, "`turn_rewards` must be a list of numbers"),
        ({"advantage": True}, "`advantage` must be a number or null"),
        ({"metadata": 5}, "`metadata` must be an object"),
        ({"metadata": {"num_turns": None}}, "`metadata.num_turns` must be an integer from 0"),
        ({"metadata": {"num_turns": float("inf")}}, "`metadata.num_turns` must be an integer from 0"),
        ({"metadata": {"tool_calls": {"f": 1}}}, "`metadata.tool_calls.f` must be an object of integers"),
        ({"messages": ["x"]}, "`messages` must be a list of objects"),
        ({"group_id": 5}, "`group_id` must be a text"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(tmp_path, change, problem):
    line = to_json(trajectory("a/0"))
    name = next(iter(change))
    (line["segments"][0] if name in line["segments"][0] else line).update(change)
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:1: not a trajectory: ") as caught:
        read_trajectories(tmp_path / "t.jsonl")
    assert problem in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    write_trajectories(tmp_path / "t.jsonl", [trajectory("a/0")])
    assert read_trajectories(tmp_path / "t.jsonl", vocab_size=151_936)
    with pytest.raises(ValueError, match=r"1: not a trajectory: segments\[0\]: `tokens` has 151935, and the model's"):
        read_trajectories(tmp_path / "t.jsonl", vocab_size=151_935)


FOREIGN = [
    None, True, False, 0, 1, -1, -5, 1.0, 1.7, 2**31, -(2**31), 2**63, 10**400, 1e39, float("nan"), float("inf"), "",
    "1", "false", "\x00", "é", [], [[]], [1], [[1]], [None], {}, {"a": 1}, {"num_turns": None}, [0] * 3, [True] * 3,
]  # fmt: skip


def mutant(rng: random.Random, line: dict[str, Any]) -> str:
    changed = json.loads(json.dumps(line))
    *inside, last = rng.choice(paths(changed)[1:])
    holder = changed
    for key in inside:
        holder = holder[key]
    match rng.randrange(5):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, rng.choice(FOREIGN))
        case 2 if isinstance(holder, dict):
            holder[rng.choice(["x", "tokens", "reward", "num_turns"])] = rng.choice(FOREIGN)
        case 3:
            text = json.dumps(changed)
            place = rng.randrange(len(text))
            return (
                text[:place] + rng.choice(['"', "[", "]", "9", "-", "", "\\ud800", "\\", "e", ","]) + text[place + 1 :]
            )
        case _:
            holder[last] = rng.choice(FOREIGN)
    return json.dumps(changed)


def test_a_mutant_is_read_as_what_it_says_or_refused_with_its_line(tmp_path):
    rng = random.Random(7)
    good = to_json(trajectory("a/0", rewards={"format": 0.25}, metadata={"num_turns": 301, "error": "x"}))
    good |= {"turn_rewards": [0.5] * 301, "messages": [{"role": "user", "content": "x"}]}
    path, refusals = tmp_path / "t.jsonl", []
    for _ in range(2000):
        text = mutant(rng, good)
        path.write_text(json.dumps(good) + "\n" + text + "\n", errors="surrogatepass")
        try:
            _, read = read_trajectories(path)
        except ValueError as error:
            refusals.append(str(error))
            continue
        said, again = json.loads(text), to_json(read)
        for name in said.keys() - {"segments"}:
            assert same(said[name], again[name]), name
        for one, other in zip(said["segments"], again["segments"], strict=True):
            for name, value in one.items():
                assert same(value, other[name]), name
    assert 500 < len(refusals) < 1900
    assert [one for one in refusals if not one.startswith(f"{path}:2: ") or len(one) > 1000] == []


def same(one: Any, other: Any) -> bool:
    """Equal as JSON is written, numbers as 32-bit floats at the least."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, float) or isinstance(other, float):
        return type(other) in (int, float) and (one == other or np.float32(one) == np.float32(other) or one != one)
    return type(one) is type(other) and one == other
