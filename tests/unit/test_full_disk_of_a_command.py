"""A disk that is full ends a command with one message; /dev/full is one."""

import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from slimrl.base import spans as spans_module
from slimrl.base.atomic import atomic_file
from slimrl.base.spans import PROFILED, RECORDING, Spans
from slimrl.cli.exit_codes import exit_codes
from slimrl.observability.logs import log_to_file

FULL = Path("/dev/full")


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    logging.captureWarnings(False)
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        # Its buffer cannot be written.
        with pytest.raises(OSError, match="No space left"):
            handler.close()
    root.handlers[:], root.level = before, level


def test_a_command_that_cannot_write_says_so_in_two_lines(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as ended, exit_codes(), FULL.open("w") as file:
        file.write("a")
    assert ended.value.exit_code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("failed: no space left on the disk. Free some and give the same command again")


def test_the_message_names_the_file_where_it_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / ".config.yaml.partial").symlink_to(FULL)
    with pytest.raises(typer.Exit), exit_codes(), atomic_file(tmp_path / "config.yaml") as file:
        file.write(b"a")
    said = "".join(capsys.readouterr().err.split())
    assert said.startswith(f"failed:{tmp_path}/config.yaml:nospaceleftonthedisk.")


def test_another_error_of_a_file_is_a_bug_and_keeps_its_traceback(tmp_path: Path):
    with pytest.raises(FileNotFoundError), exit_codes():
        (tmp_path / "none").read_text()


def test_a_log_on_a_full_disk_is_said_once_and_stops_nobody(log: logging.Logger, capfd: pytest.CaptureFixture[str]):
    log_to_file(FULL)
    for _ in range(3):
        log.info("a line")
    assert capfd.readouterr().err == "/dev/full: cannot be written: no space left on the disk\n"


def test_a_log_and_an_output_on_a_full_disk_stop_nobody(log: logging.Logger, monkeypatch: pytest.MonkeyPatch):
    with FULL.open("wb", buffering=0) as file:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, write_through=True))
        log_to_file(FULL)
        with pytest.raises(OSError, match="No space left"):
            print("a line", file=sys.stderr)
        log.info("a line")


def test_what_is_timed_goes_on_without_spans(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / PROFILED).touch()
    (tmp_path / RECORDING).write_text("step")
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / f"driver-{os.getpid()}.jsonl").symlink_to(FULL)
    spans, done = Spans(), []
    spans.open(tmp_path, "driver")
    for number in range(3):
        with spans("rollout"):
            done.append(number)
    assert done == [0, 1, 2]
    assert caplog.messages == ["driver records no more spans: no space left on the disk"]


def test_what_is_timed_goes_on_where_another_thread_gives_the_spans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / PROFILED).touch()
    spans, done = Spans(), []
    spans.open(tmp_path, "driver")

    def monotonic() -> float:
        """The time, before which the other thread met a full disk."""
        spans._folder = None
        return time.monotonic()

    monkeypatch.setattr(spans_module, "time", SimpleNamespace(monotonic=monotonic, time_ns=time.time_ns))
    with spans("rollout"):
        done.append(0)
    assert done == [0]
