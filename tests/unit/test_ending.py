"""How a run ends before its time: which signal raises, what is said then, and who is killed."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slimrl.base.errors import Interrupted
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster import ending
from slimrl.runtime.cluster.ending import ChildProcesses, ending_on_signals, what_is_left


@pytest.fixture(autouse=True)
def own_handlers():
    """Whatever a test leaves, pytest's own handlers come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_the_run_and_others_do_not_disturb_the_way_out(number: signal.Signals):
    before = signal.getsignal(number)
    order = []

    def hint() -> str:
        order.append("hint")
        return "step 3 is whole."

    def end() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            order.append("way out")

    with pytest.raises(Interrupted) as caught, ending_on_signals(hint):
        end()
    assert str(caught.value) == f"ended by {number.name}. step 3 is whole."
    assert order == ["way out", "hint"]
    assert signal.getsignal(number) is before


def test_what_ray_raises_instead_is_the_same_end_and_its_handlers_are_taken_over_again():
    def end(take_over) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        take_over()
        assert callable(signal.getsignal(signal.SIGINT))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Interrupted:
            raise KeyboardInterrupt from None

    with pytest.raises(Interrupted, match=r"^ended by SIGTERM\.$"), ending_on_signals(lambda: "") as take_over:
        end(take_over)
    with pytest.raises(ValueError, match="other"), ending_on_signals(lambda: "never"):
        raise ValueError("other")


def test_a_run_says_how_it_goes_on_and_logs_alone_say_nothing(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert what_is_left(folder) == ""
    folder.config.write_text("")
    assert what_is_left(folder).startswith(f"{tmp_path} holds no checkpoint yet: ")
    for step in (3, 12):
        (folder.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    assert what_is_left(folder).startswith(f"{folder.checkpoints / 'step_000012'} is whole: ")


class Process:
    """Ends by itself, when it is killed, or not at all."""

    def __init__(self, pid: int, *, ends: bool = False, gone: bool = False) -> None:
        self.pid, self.ends, self.gone = pid, ends, gone
        self.killed = False

    def cmdline(self) -> list[str]:
        if self.gone:
            raise psutil.NoSuchProcess(self.pid)
        return ["python", "-m", "slimrl.engines.plugin.launch", "--api-key", "secret"]

    def send_signal(self, number: signal.Signals) -> None:
        if self.gone:
            raise psutil.NoSuchProcess(self.pid)
        self.killed = number is signal.SIGKILL


def test_processes_that_a_run_started_are_waited_for_and_killed_if_they_stay(monkeypatch: pytest.MonkeyPatch, caplog):
    older, ends, stays, gone, late = Process(1), Process(2, ends=True), Process(3), Process(4, gone=True), Process(5)
    children, waited = [older], []

    def of_this_one(*, recursive):
        assert recursive
        return children

    def await_end(processes, timeout_s):
        waited.append(({process.pid for process in processes}, timeout_s))
        return [process for process in processes if not process.ends]

    monkeypatch.setattr(ending.psutil, "Process", lambda: SimpleNamespace(children=of_this_one))
    monkeypatch.setattr(ending, "await_end", await_end)
    family = ChildProcesses()
    children = [older, ends, stays, gone]
    family.note()
    # Those have lost their parent, and are below this process no more.
    children = [older, late]
    family.end()
    assert [process.killed for process in (older, ends, stays, gone, late)] == [False, False, True, False, True]
    assert waited == [({2, 3, 4, 5}, ending.END_TIMEOUT_S), ({3, 4, 5}, ending.END_TIMEOUT_S)]
    assert "killing 3, which did not end: python -m slimrl.engines.plugin.launch" in caplog.text
    assert "secret" not in caplog.text
