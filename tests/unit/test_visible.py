"""Text of others never steers the terminal of a reader, wherever it is shown."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from slimrl_tools.exit_codes import exit_codes as tools_exit_codes

from slimrl.base.visible import visible
from slimrl.cli.exit_codes import exit_codes
from slimrl.data.preview import Preview, PreviewToken
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.observability.chat_preview import as_json, print_preview
from slimrl.observability.logs import log_to_file
from slimrl.observability.progress import Progress
from slimrl.observability.samples import write_samples
from slimrl.observability.terminal import plain_console

HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\x08\x00\x7f\u202eabc\u2066\u2028 é 日本 \U0001f600"
STEERING = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x200E, 0x202E, 0x2066, 0x2028)]


def assert_harmless(text: str) -> None:
    assert [one for one in STEERING if one in text] == []
    assert "\\u001b[31mred\\u009b2J" in text
    assert "é 日本 \U0001f600" in text


def terminal() -> tuple[Any, io.StringIO]:
    console = plain_console()
    console.file = io.StringIO()
    console.width = 200
    return console, console.file


def test_a_text_is_shown_as_what_it_is():
    assert_harmless(visible(HOSTILE))
    assert visible("a\tb\nc") == "a\tb\nc"
    assert json.loads(visible(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


@pytest.mark.parametrize("kind", ["text", "table", "preview", "progress"])
def test_what_a_console_prints_is_harmless(kind: str):
    console, shown = terminal()
    if kind == "text":
        console.print(HOSTILE)
    elif kind == "table":
        table = Table("a")
        table.add_row(HOSTILE)
        console.print(table)
    elif kind == "preview":
        tokens = [PreviewToken(id=1, text=HOSTILE, source="prompt", trained=False)]
        print_preview(Preview(stop_token_ids=(2,), segments=[tokens]), console)
    else:
        Progress(1, console=console).say(HOSTILE)
    said = shown.getvalue()
    assert_harmless(said)


def test_a_terminal_still_gets_its_colours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console, shown = terminal()
    console._force_terminal, console._color_system = True, 1  # type: ignore[assignment]
    console.print(HOSTILE, style="bold")
    assert "\x1b[1m" in shown.getvalue()
    assert "\x1b]0" not in shown.getvalue()
    assert "\\u001b]0" in shown.getvalue()


def test_a_preview_as_json_is_harmless_and_the_same():
    tokens = [PreviewToken(id=1, text=HOSTILE, source="tool", trained=False)]
    said = as_json(Preview(stop_token_ids=(2,), segments=[tokens]))
    assert_harmless(said)
    assert json.loads(said)["tokens"][0]["text"] == HOSTILE


def test_logs_and_samples_are_harmless(tmp_path: Path):
    before = logging.root.handlers[:], logging.root.level
    try:
        log_to_file(tmp_path / "log")
        logging.getLogger("x").warning("an agent ended with exit code 1: %s", HOSTILE)
        try:
            raise ZeroDivisionError(HOSTILE)
        except ZeroDivisionError:
            logging.getLogger("x").exception("raised")
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)
        logging.captureWarnings(False)
    said = (tmp_path / "log").read_text()
    assert said.count("\\u001b[31mred") == 2
    assert_harmless(said)
    trajectory = Trajectory(
        group_id="g", trajectory_id="t", segments=[], status=Status.failed, metadata={"error": HOSTILE}
    )
    write_samples(
        tmp_path / "samples" / "s.jsonl", [trajectory], {"g": Prompt(prompt_id="g", messages=[], label=None)}, 1
    )
    line = (tmp_path / "samples" / "s.jsonl").read_text()
    assert_harmless(line)
    assert json.loads(line)["metadata"]["error"] == HOSTILE


@pytest.mark.parametrize("codes", [exit_codes, tools_exit_codes])
def test_an_error_of_a_command_is_harmless(codes: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(Exception, match="2"), codes():
        raise ValueError(HOSTILE)
    assert_harmless(capsys.readouterr().err)
