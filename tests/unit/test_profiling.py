"""Spans, their trace and the breakdown of a step."""

import asyncio
import json
import os
import pickle
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from slimrl.base.spans import LOOK_S, PROFILED, RECORDING, SPANS, Spans, child_variables
from slimrl.config.schema.run import TrackingConfig
from slimrl.observability.profiling.breakdown import BETWEEN, own_times, step_profiles
from slimrl.observability.profiling.recorder import STEP, Profiled, Recorder, check_profiled, parse_steps
from slimrl.observability.profiling.tables import phases_table, profile_tables
from slimrl.observability.profiling.trace import Span, read_spans, within, write_trace
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.commands import _recorder

MS = 1_000_000


def span(name: str, begin_ms: float, end_ms: float, track: str = "main", process: str = "driver", **details) -> Span:
    return Span(
        process=process, track=track, name=name, begin=int(begin_ms * MS), end=int(end_ms * MS), details=details
    )


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Spans, Path]:
    for sign in (PROFILED, RECORDING):
        (tmp_path / sign).touch()
    spans = Spans()
    spans.open(tmp_path, "trainer 0")
    return spans, tmp_path


def test_an_attempt_that_is_not_profiled_keeps_the_profile_of_the_one_before(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.profile.mkdir()
    for name in ("trace.json", PROFILED, RECORDING):
        (folder.profile / name).touch()
    with _recorder(folder, None, TrackingConfig(), None) as recorder:  # type: ignore[arg-type]
        assert recorder is None
        assert [file.name for file in folder.profile.iterdir()] == ["trace.json"], "and nothing is recorded"
        assert child_variables(folder.profile, "engine 0") == {}
        spans = Spans()
        spans.open(folder.profile, "trainer 0")
        assert not spans.is_open


def test_a_block_is_recorded_with_its_times_and_details(recorded):
    spans, folder = recorded
    before = time.time_ns()
    with spans("forward", tokens=7):
        time.sleep(0.01)
    [found] = read_spans(folder)
    assert (found.process, found.name, found.details) == (f"trainer 0 ({os.getpid()})", "forward", {"tokens": 7})
    assert before <= found.begin <= found.end - 10 * MS <= time.time_ns()


def test_a_block_that_raises_is_recorded(recorded):
    spans, folder = recorded
    with pytest.raises(KeyError), spans("tool"):
        raise KeyError
    assert [found.name for found in read_spans(folder)] == ["tool"]


def test_nothing_is_written_without_a_profile_or_beside_its_steps(tmp_path):
    spans = Spans()
    spans.open(tmp_path / "absent", "driver")
    assert not spans.is_open
    with spans("a"):
        pass
    (tmp_path / PROFILED).touch()
    spans.open(tmp_path, "driver")
    assert spans.is_open
    with spans("b"):
        pass
    assert [file.name for file in tmp_path.iterdir()] == [PROFILED]


def test_recording_begins_and_ends_with_the_file(tmp_path):
    (tmp_path / PROFILED).touch()
    spans = Spans()
    spans.open(tmp_path, "engine 0")
    for name, is_recorded in (("before", False), ("inside", True), ("after", False)):
        flag = tmp_path / RECORDING
        flag.touch() if is_recorded else flag.unlink(missing_ok=True)
        time.sleep(2 * LOOK_S)
        with spans(name):
            pass
    assert [found.name for found in read_spans(tmp_path)] == ["inside"]


def test_a_forked_process_has_a_file_of_its_own(recorded):
    spans, folder = recorded
    with spans("parent"):
        pass
    if (pid := os.fork()) == 0:
        with spans("child"):
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    assert {found.process: found.name for found in read_spans(folder)} == {
        f"trainer 0 ({os.getpid()})": "parent",
        f"trainer 0 ({pid})": "child",
    }


def test_coroutines_have_lanes_of_their_own_which_are_used_again(recorded):
    spans, folder = recorded

    async def episode(turns: int) -> None:
        with spans.lane("episode"):
            for _ in range(turns):
                with spans("generate"):
                    await asyncio.sleep(0.001)

    async def main() -> None:
        await asyncio.gather(episode(2), episode(2))
        await episode(1)

    asyncio.run(main())
    tracks = [found.track for found in read_spans(folder)]
    assert sorted(tracks) == ["episode 0001"] * 3 + ["episode 0002"] * 2
    for track in set(tracks):
        on_track = [found for found in read_spans(folder) if found.track == track]
        assert all(a.end <= b.begin for a, b in pairwise(on_track))


def test_a_pickled_copy_is_the_object_of_the_process():
    assert pickle.loads(pickle.dumps(SPANS)) is SPANS


def test_the_broken_last_line_of_a_killed_process_is_left_out(recorded):
    spans, folder = recorded
    with spans("whole"):
        pass
    [path] = folder.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"name": "bro')
    assert [found.name for found in read_spans(folder)] == ["whole"]
    path.write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"jsonl:1: not a span"):
        read_spans(folder)


def test_the_trace_has_every_span_in_its_process_and_track(recorded):
    spans, folder = recorded
    with spans("outer"), spans("inner"):
        pass
    file = write_trace(folder)
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    complete = {event["name"]: event for event in events if event["ph"] == "X"}
    assert names == {complete["outer"]["pid"]: f"trainer 0 ({os.getpid()})"}
    outer, inner = complete["outer"], complete["inner"]
    assert outer["tid"] == inner["tid"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    # Chrome's unit is the microsecond.
    assert outer["dur"] == pytest.approx(read_spans(folder)[0].seconds * 1e6)


def test_torch_events_are_moved_to_the_clock_of_the_spans(recorded):
    from torch import ones
    from torch.profiler import profile

    spans, folder = recorded
    with spans("sum"), profile() as torch_profile:
        (ones(1000) + 1).sum()
    torch_profile.export_chrome_trace(str(folder / "trainer_0.torch.json"))
    events = json.loads(write_trace(folder).read_text())["traceEvents"]
    [outer] = [event for event in events if event["name"] == "sum" and event["ph"] == "X"]
    added = [event for event in events if event["name"] == "aten::add"]
    assert added
    assert all(outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"] for event in added)


def test_phases_and_what_is_between_them_add_up_to_the_step():
    spans = [
        span(STEP, 0, 100, number=3),
        span("rollout", 5, 40),
        span("generate", 6, 39),
        span("train", 50, 90),
        span("late", 90, 130),
        span("generate", 0, 100, track="episode 0001"),
    ]
    [profile] = step_profiles(spans)
    assert profile.number == 3
    assert profile.phases == pytest.approx({"rollout": 0.035, "train": 0.040, "late": 0.010, BETWEEN: 0.015})
    assert sum(profile.phases.values()) == pytest.approx(profile.seconds)
    assert profile.tracks == {"driver, main": 1, "driver, episode": 1}


def test_threads_are_told_apart_and_numbered_tracks_are_summed():
    spans = [
        span(STEP, 0, 100, number=1),
        span("rollout", 0, 80),
        span("generate", 10, 60, "episode 0001"),
        span("generate", 10, 70, "episode 0002"),
        span("send", 5, 15, "sender", "trainer 0"),
        span("forward", 0, 30, "calls", "trainer 0"),
        span("decode", 0, 40, "calls", "engine 0"),
    ]
    [profile] = step_profiles(spans)
    assert profile.processes == {
        "driver, main": {"rollout": (0.08, 1)},
        "driver, episode": {"generate": (0.11, 2)},
        "trainer 0, sender": {"send": (0.01, 1)},
        "trainer 0, calls": {"forward": (0.03, 1)},
        "engine 0": {"decode": (0.04, 1)},
    }
    assert profile.tracks == {**dict.fromkeys(profile.processes, 1), "driver, episode": 2}
    console = Console(record=True, width=100)
    console.print(profile_tables(profile))
    text = console.export_text()
    assert re.search(r"trainer 0, calls *\n.*\n.*\nforward +0.030 .*\nnothing +0.070", text)
    assert re.search(r"driver, episode, sums of 2 tracks *\n.*\n.*\ngenerate +0.110 .*\n *\n", text)


def test_a_step_that_the_run_does_not_have_is_refused():
    check_profiled(None, 2)
    check_profiled(Profiled(steps=frozenset({1, 2})), 2)
    with pytest.raises(ValueError, match="there is no step 99; the run has 2"):
        check_profiled(Profiled(steps=frozenset({2, 99})), 2)


def test_own_time_is_without_the_spans_inside():
    spans = [span("a", 0, 10), span("b", 2, 5), span("c", 3, 4), span("b", 6, 7), span("a", 0, 4, track="other")]
    times = own_times(spans)
    assert {name: count for name, (_, count) in times.items()} == {"a": 2, "b": 2, "c": 1}
    seconds = {name: own for name, (own, _) in times.items()}
    assert seconds == pytest.approx({"a": 0.010, "b": 0.003, "c": 0.001})


def test_a_span_is_cut_to_the_period():
    assert [(one.begin, one.end) for one in within([span("a", 0, 10), span("b", 20, 30)], 5 * MS, 20 * MS)] == [
        (5 * MS, 10 * MS)
    ]


@pytest.mark.parametrize(("text", "steps"), [("3", {3}), ("3-5", {3, 4, 5}), ("2, 7-8", {2, 7, 8})])
def test_steps_are_read(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "0", "5-3", "a", "1,,2", "-1"])
def test_other_steps_are_refused(text):
    with pytest.raises(ValueError, match="--profile"):
        parse_steps(text)


def test_a_recorder_records_its_steps_alone(tmp_path):
    calls = []

    class Trainers:
        def begin_torch_profile(self) -> None:
            calls.append("begin")

        def end_torch_profile(self, folder: Path) -> None:
            calls.append(folder.name)

    trainers = Trainers()
    recorder = Recorder(tmp_path / "profile", Profiled(steps=frozenset({2}), torch=True))
    try:
        for number in (1, 2, 3):
            with recorder.step(number, trainers), SPANS("work", number=number):
                pass
        assert [path.name for path in (tmp_path / "profile").glob("*/")] == ["step_000002"]
        [profile] = step_profiles(read_spans(tmp_path / "profile"))
        assert (profile.number, list(profile.phases)) == (2, ["work", BETWEEN])
        assert calls == ["begin", "profile"]
        assert recorder.finish() == tmp_path / "profile" / "trace.json"
    finally:
        SPANS.open(tmp_path / "none", "tests")


def test_the_table_of_phases_leaves_out_the_first_step():
    names = ("rollout", "logprobs", "train", "resync", "other", "step")
    steps = [{"step": n, **{f"time/{name}_s": 10.0 if n == 1 else 1.0 for name in names}} for n in (1, 2, 3)]
    table = phases_table(steps)
    assert table.title == "2 steps, without the first"
    assert [column._cells[-1] for column in table.columns] == ["step", "1.000", "1.000", "100.0%"]
    assert phases_table(steps[:1]) is None
    evaluated = [*steps[:-1], {**steps[-1], "time/eval_s": 7.0}]
    assert [column._cells[-1] for column in phases_table(evaluated).columns] == [
        "evaluation, 1 of them",
        "7.000",
        "7.000",
        "",
    ]


def test_the_table_has_the_waits_before_a_resync_where_a_run_has_them():
    seconds = {"rollout": 1.0, "logprobs": 1.0, "train": 1.0, "resync": 0.5, "other": 0.5}
    plain = [{"step": n, "time/step_s": 4.0, **{f"time/{name}_s": s for name, s in seconds.items()}} for n in (1, 2)]
    waiting = [{**line, "time/step_s": 12.0, "time/drain_s": 2.0, "time/eval_wait_s": 6.0} for line in plain]
    parts = {}
    for steps in (plain, waiting):
        names, *_, shares = (column._cells for column in phases_table(steps).columns)
        parts[len(names)] = dict(zip(names, shares, strict=True))
    assert parts[6].keys() == {*seconds, "step"}
    assert [parts[8][name] for name in ("drain", "eval_wait", "resync")] == ["16.7%", "50.0%", "4.2%"]
