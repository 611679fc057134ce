"""What a run records of its steps: the file read back, which trajectories it has, and the bound on its bytes."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from slimrl.algorithms.selection import Selection
from slimrl.config.schema.run import TrackingConfig
from slimrl.data.prompt import Prompt
from slimrl.data.token_values import TOKEN_VALUES, TokenValues
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.observability.record_writer import RecordWriter
from slimrl.observability.recorded_trajectories import (
    Recorded,
    read_recorded,
    token_texts,
    whole_groups,
    write_recorded,
)
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.step_rollout import StepRollout
from slimrl.runtime.recording import Recording
from slimrl.runtime.step_metrics import Step

WORDS = {1: "Two", 2: " plus", 3: " two", 4: " is", 5: " four", 6: "."}


def decode(tokens) -> str:
    return "".join(WORDS[token] for token in tokens)


def segment(**others) -> Segment:
    """Six tokens, of which the policy sampled the last three."""
    mask = np.array([False, False, False, True, True, True])
    return Segment(
        tokens=np.arange(1, 7, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.float32([0, 0, 0, -0.5, -0.25, -1.0]),
        weight_versions=np.where(mask, 4, -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int16),
        **others,
    )


def trajectory(group: str, sample: int, *segments: Segment, **others) -> Trajectory:
    return Trajectory(
        group_id=group,
        trajectory_id=f"step_000007/{group}/{sample}",
        segments=list(segments) or [segment()],
        status=Status.completed,
        **{"reward": 0.5, **others},
    )


def test_a_recorded_step_read_back_has_the_tokens_their_texts_and_what_the_update_found_at_each(tmp_path: Path):
    read, unread = segment(role="player", teacher_logprobs=np.float32([0, 0, 0, -1, -2, -3])), segment()
    first = trajectory(
        "p0", 0, read, unread, rewards={"format/think": 1.0, "right": 0.0}, role_rewards={"player": 0.25},
        turn_rewards=[0.125], messages=[{"role": "user", "content": "2 + 2? \u2028"}], metadata={"num_turns": 2},
    )  # fmt: skip
    unscored = trajectory("p0", 1, reward=float("nan"))
    values = TokenValues([first, unscored])
    found = {name: np.float32([number, number + 1, 0]) for number, name in enumerate(TOKEN_VALUES)}
    values.add(read, found)
    path = tmp_path / "trajectories" / "step_000007.parquet"
    write_recorded(
        path,
        Recorded(
            step=7, values=values, sources={"p0": "train"}, labels={"p0": {"answer": 4}},
            advantages={first.trajectory_id: -1.5},
        ),
        decode,
    )  # fmt: skip
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["trajectory_id"] for row in rows] == ["step_000007/p0/0", "step_000007/p0/1"]
    row, other = rows
    plain = ("step", "data_source", "group_id", "status", "reward", "advantage", "num_turns", "num_tokens")
    assert [row[name] for name in plain] == [7, "train", "p0", "completed", 0.5, -1.5, 2, 12]
    assert (other["reward"], other["advantage"]) == (None, None)
    assert dict(row["rewards"]) == {"format/think": 1.0, "right": 0.0}
    assert (dict(row["role_rewards"]), row["turn_rewards"]) == ({"player": 0.25}, [0.125])
    assert (json.loads(row["label"]), json.loads(row["messages"])) == ({"answer": 4}, first.messages)
    trained, passed_over = row["segments"]
    assert (trained["role"], trained["tokens"]) == ("player", [1, 2, 3, 4, 5, 6])
    assert trained["texts"] == ["Two", " plus", " two", " is", " four", "."]
    assert trained["loss_mask"] == [False] * 3 + [True] * 3
    assert trained["rollout_logprobs"] == [0, 0, 0, -0.5, -0.25, -1]
    assert (trained["weight_versions"], trained["turn_ids"]) == ([-1] * 3 + [4] * 3, [-1] * 3 + [0] * 3)
    assert trained["teacher_logprobs"] == [0, 0, 0, -1, -2, -3]
    assert trained["trainer_logprobs"] == [None, None, None, 0, 1, 0]
    assert trained["clipped"] == [None, None, None, True, True, False]
    assert trained["entropies"] == [None, None, None, 4, 5, 0]
    assert {name: passed_over[name] for name in TOKEN_VALUES} == dict.fromkeys(TOKEN_VALUES)
    assert passed_over["teacher_logprobs"] is None
    ours = read_recorded(path)
    assert (ours[0]["messages"], ours[0]["label"]) == (first.messages, {"answer": 4})
    assert ours[0]["rewards"] == {"format/think": 1.0, "right": 0.0}


def test_an_update_s_values_lie_on_the_tokens_that_the_policy_sampled_but_for_a_first_one():
    own = segment()
    own.loss_mask[:] = [True, False, True, False, True, True]
    values = TokenValues([trajectory("p0", 0, own)])
    assert values.numbers_in([segment(), own]) == {1}
    values.add(own, {"ratios": np.float32([1, 2, 3]), "trainer_logprobs": np.zeros(3)}, without=["trainer_logprobs"])
    np.testing.assert_array_equal(values.of(own)["ratios"], np.float32([np.nan, np.nan, 1, np.nan, 2, 3]))
    assert values.of(own).keys() == {"ratios"}


def test_a_character_of_several_tokens_is_whole_at_the_first_of_them():
    pieces = [b"a", b"\xe2\x82", b"\xac", b"b", b"\xff"]
    texts = token_texts(np.arange(5), lambda tokens: b"".join(pieces[t] for t in tokens).decode(errors="replace"))
    assert texts == ["a", "\u20ac", "", "b", "\ufffd"]


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, ""), (1, "aa"), (2, "aa"), (4, "aa"), (5, "aabbb"), (6, "aabbbc"), (-1, "aabbbc")]
)
def test_whole_groups_are_recorded_the_first_ones_and_one_at_least(limit: int, expected: str):
    # Groups need not lie together.
    sampled = [trajectory(group, number) for number, group in enumerate("abcabb")]
    assert "".join(one.group_id for one in whole_groups(sampled, limit)) == expected


def recorded(step: int) -> Recorded:
    values = TokenValues([trajectory("p0", 0)])
    return Recorded(step=step, values=values, sources={}, labels={}, advantages={})


def test_beyond_its_bytes_a_record_is_thinned_evenly_and_says_so(tmp_path: Path):
    write_recorded(tmp_path / "size.parquet", recorded(1), decode)
    size = (tmp_path / "size.parquet").stat().st_size
    said: list[str] = []
    folder = RunFolder(tmp_path / "run")
    folder.trajectories.mkdir(parents=True)
    writer = RecordWriter(folder.trajectories, decode, most_bytes=int(4.5 * size), keep_through_step=0, say=said.append)
    for step in range(1, 13):
        writer.write(folder.recorded_file(step), recorded(step))
    writer.write(folder.eval_recorded_file(12, "heldout"), recorded(12))
    writer.flush()
    left = [path.name for path in sorted(folder.trajectories.iterdir())]
    assert left == ["eval_000012_heldout.parquet", *(f"step_{step:06d}.parquet" for step in (4, 8, 12))]
    assert [text[-len("one step in 2 is kept") :] for text in said] == [f"one step in {n} is kept" for n in (2, 4)]


def test_a_resumed_run_drops_the_record_of_steps_that_it_makes_again_and_a_broken_disk_is_named(tmp_path: Path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        write_recorded(folder.recorded_file(step), recorded(step), decode)
    folder.sample_file(3).write_text("kept")
    writer = RecordWriter(folder.trajectories, decode, most_bytes=10**9, keep_through_step=2)
    assert sorted(path.name for path in folder.trajectories.iterdir()) == [
        "step_000001.parquet", "step_000002.parquet", "step_000003.jsonl",
    ]  # fmt: skip
    folder.recorded_file(3).mkdir()
    writer.write(folder.recorded_file(3), recorded(3))
    with pytest.raises(OSError, match=r"step_000003\.parquet"):
        writer.flush()


def test_a_step_s_groups_are_chosen_before_its_updates_and_written_with_advantages_after_them(tmp_path: Path):
    folder = RunFolder(tmp_path)
    prompts = {name: Prompt(prompt_id=name, messages=[], label=name) for name in ("p0", "p1")}
    task = SimpleNamespace(
        train={"sums": list(prompts.values())},
        dialogues=SimpleNamespace(chat=SimpleNamespace(template=SimpleNamespace(decode=decode))),
    )
    said: list[str] = []
    recording = Recording(TrackingConfig(recorded_trajectories_per_step=2), folder, task, 0, said.append)
    sampled = [trajectory(group, number) for group in prompts for number in range(2)]
    selection = Selection(
        trajectories=sampled[1:], advantages=np.float32([0.5, 1, -1]), zero_variance=np.full(3, False), num_groups=2,
        num_zero_variance=0,
    )  # fmt: skip
    step = Step(7)
    recording.choose(step, StepRollout(sampled=sampled, prompts=prompts, selection=selection, metrics={}, seconds=1.0))
    assert step.tokens.numbers_in([one.segments[0] for one in sampled]) == {0, 1}
    step.tokens.add(sampled[1].segments[0], {"ratios": np.float32([1, 1, 2])})
    recording.write_step()
    recording.write_step()
    # Trajectories end in any order.
    recording.write_evaluation(7, "heldout", list(prompts.values()), sampled[::-1])
    recording.finish()
    left_out, trained = read_recorded(folder.recorded_file(7))
    assert (left_out["data_source"], left_out["label"], trained["advantage"]) == ("sums", "p0", 0.5)
    assert left_out["advantage"] is None
    assert "ratios" not in left_out["segments"][0]
    assert trained["segments"][0]["ratios"] == [None, None, None, 1, 1, 2]
    found = read_recorded(folder.eval_recorded_file(7, "heldout"))
    assert [(row["data_source"], row["trajectory_id"]) for row in found] == [
        ("heldout", "step_000007/p0/0"), ("heldout", "step_000007/p0/1"),
    ]  # fmt: skip
    # On a disk that takes nothing more the run goes on, and says so once.
    folder.eval_recorded_file(8, "heldout").mkdir()
    recording.write_evaluation(8, "heldout", list(prompts.values()), sampled)
    recording.finish()
    recording.write_evaluation(9, "heldout", list(prompts.values()), sampled)
    recording.finish()
    assert len(said) == 1
    assert said[0].startswith("trajectories are recorded no more: ")
    assert not folder.eval_recorded_file(9, "heldout").exists()
