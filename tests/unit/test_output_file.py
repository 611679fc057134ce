"""Files that a command could not write at its end."""

import os
from pathlib import Path

import pytest

from slimrl.base.output_file import check_output_file


def test_a_file_that_can_be_written_passes_and_its_folder_is_made(tmp_path: Path):
    old = tmp_path / "old.json"
    old.write_text("{}")
    check_output_file("--json", old)
    check_output_file("--json", tmp_path / "deep" / "new.json")
    assert (tmp_path / "deep").is_dir()
    assert old.read_text() == "{}"


@pytest.mark.parametrize(
    ("denied", "message"), [("file.json", "cannot be written"), ("", "its folder cannot be written")]
)
def test_what_the_user_may_not_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied, message):
    file = tmp_path / "file.json"
    file.touch()
    # Root may write anything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / denied)
    with pytest.raises(ValueError, match=f"^--json {file}: {message}.$"):
        check_output_file("--json", file)


def test_a_folder_and_one_that_may_not_be_looked_into_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="is a folder; give a file"):
        check_output_file("--out", tmp_path)

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(ValueError, match="its folder cannot be made: Permission denied"):
        check_output_file("--out", tmp_path / "file")
