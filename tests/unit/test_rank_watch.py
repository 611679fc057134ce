"""What the driver makes of the ranks' progress while it waits for a call: a display, and a hang."""

import threading
import time
from types import SimpleNamespace

import pytest
import ray

from slimrl.base.errors import NoAnswer
from slimrl.runtime.cluster import actors, rank_watch
from slimrl.runtime.cluster.rank_position import RankPosition, RankProgress, position
from slimrl.runtime.cluster.rank_watch import RankWatch


class Rank:
    """Answers at once with `count`, unless it is silent."""

    def __init__(self) -> None:
        self.asked, self.count, self.silent, self.dead = 0, 0, False, False
        self.progress, self.position = SimpleNamespace(remote=self._progress), SimpleNamespace(remote=self._position)

    def _progress(self):
        self.asked += 1
        return self, RankProgress(self.count, 8, self.count)

    def _position(self):
        return self, RankPosition(f"{self.count} of 8 done, in forward (model.py:7)", "all stacks")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rank]:
    def wait(refs, num_returns, timeout):
        return [ref for ref in refs if not ref[0].silent], []

    def get(ref):
        if ref[0].dead:
            raise ray.exceptions.RayError("died")
        return ref[1]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return {"trainer 0": Rank(), "trainer 1": Rank()}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(rank_watch.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_first_rank_s_progress_is_shown_and_asked_for_anew_once_it_has_been_answered(ranks, clock):
    shown: list[tuple[int, int]] = []
    phase = SimpleNamespace(update=lambda done, total: shown.append((done, total)))
    watch = RankWatch("trainer", "accumulate", ranks, phase, None)
    ranks["trainer 0"].silent = True
    for _ in range(3):
        watch()
    assert (ranks["trainer 0"].asked, ranks["trainer 1"].asked, shown) == (1, 0, [])
    ranks["trainer 0"].silent = False
    watch()
    assert (ranks["trainer 0"].asked, shown) == (2, [(0, 8)])
    # Whoever made the call reports one that has ended.
    ranks["trainer 0"].dead = True
    watch()
    assert shown == [(0, 8)]


def test_a_call_is_as_slow_as_it_likes_while_one_rank_moves(ranks, clock):
    watch = RankWatch("trainer", "accumulate", ranks, None, 10.0)
    ranks["trainer 0"].silent = True
    for _ in range(30):
        clock.now += 6.0
        ranks["trainer 1"].count += 1
        watch()
    for _ in range(4):
        clock.now += 3.0
        watch()
    clock.now += 3.0
    with pytest.raises(NoAnswer) as caught:
        watch()
    assert str(caught.value) == (
        "trainer: no rank made progress in accumulate for 10 s (trainer.hang_timeout_s). "
        "trainer 0: no answer; trainer 1: 30 of 8 done, in forward (model.py:7)"
    )
    assert caught.value.details == "trainer 1\nall stacks"


def test_calls_without_a_count_have_their_own_deadline(ranks, clock):
    watch = RankWatch("trainer", "save_checkpoint", ranks, None, None)
    for _ in range(5):
        clock.now += 1e6
        watch()
    assert ranks["trainer 1"].asked == 0


def test_a_process_says_in_which_line_of_its_call_it_stands(monkeypatch):
    stop = threading.Event()

    class Actor:
        def accumulate(self) -> None:
            self.forward()

        def forward(self) -> None:
            stop.wait(30)

    thread = threading.Thread(target=actors.run, args=(Actor(), Actor.accumulate), name="calls")
    assert position(RankProgress(2, 8, 2)).text == "2 of 8 done, in no call"
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while "forward" not in (found := position(RankProgress(3, 8, 3))).text and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert found.text.startswith("3 of 8 done, in wait (threading.py:")
    assert "< forward (test_rank_watch.py:" in found.text
    assert "thread calls:" in found.stacks
    assert "stop.wait(30)" in found.stacks
