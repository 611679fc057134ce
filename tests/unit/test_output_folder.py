"""The folder of a long conversion: whole under its name, or kept under a temporary one for the same job alone."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from slimrl_tools.convert.output_folder import check_space, output_folder, partial_path, source_files

JOB = {"command": "test", "block": (16, 16)}


def test_what_is_written_appears_under_its_name_without_the_job(tmp_path):
    out = tmp_path / "out"
    with output_folder(out, JOB, resume=False) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert [file.name for file in out.iterdir()] == ["a"]
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def write(out, job=JOB, *, resume=False, name="a", then=lambda: None):
    """A job that writes one file and then does something."""
    with output_folder(out, job, resume=resume) as folder:
        (folder / name).write_text("1")
        then()


def interrupted():
    raise KeyboardInterrupt


def test_an_interrupted_job_keeps_what_it_finished_and_is_continued(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as caught:
        write(out, then=interrupted)
    assert caught.value.__notes__ == [f"Finished files are in {partial_path(out)}; --resume continues from there."]
    with pytest.raises(ValueError, match="continue it with --resume"):
        write(out)
    with pytest.raises(ValueError, match=r"another job \(--block differs\)"):
        write(out, JOB | {"block": (8, 8)}, resume=True)
    with output_folder(out, JOB, resume=True) as folder:
        assert (folder / "a").read_text() == "1"
    assert [file.name for file in out.iterdir()] == ["a"]


def test_a_job_that_finished_nothing_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", name=".half.partial", then=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_resume_begins_where_there_is_nothing_to_continue(tmp_path):
    with output_folder(tmp_path / "out", JOB, resume=True):
        pass
    assert (tmp_path / "out").is_dir()


def test_two_processes_do_not_write_one_folder(tmp_path):
    out = tmp_path / "out"

    def also():
        with pytest.raises(ValueError, match="another process is writing it"):
            write(out, resume=True)

    write(out, then=also)
    assert (out / "a").exists()


def test_an_output_that_came_into_being_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="was created by something else meanwhile"):
        write(out, then=out.mkdir)
    assert list(out.iterdir()) == []
    assert (partial_path(out) / "a").read_text() == "1"


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"needs 1,000,000\.00 GB, [\d.,]+ .?B are free"):
        check_space(tmp_path / "not" / "there" / "out", 10**15)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_500))
    with pytest.raises(OSError, match=r"needs 40\.00 MB, 1\.50 kB are free"):
        check_space(tmp_path / "out", 40_000_000)
    check_space(tmp_path / "out", 1_500)


def test_an_output_below_a_folder_that_is_not_there_is_refused(tmp_path):
    out = tmp_path / "mnt" / "dsik" / "out"
    with pytest.raises(ValueError, match=re.escape(f"{out}: there is no folder {out.parent}; make it first")):
        write(out)
    assert list(tmp_path.iterdir()) == []


def test_a_source_is_known_by_the_sizes_and_times_of_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("1")
    before = source_files(tmp_path)
    assert list(before) == ["config.json"]
    assert json.loads(json.dumps(before)) == before
    (tmp_path / "README.md").write_text("12")
    assert source_files(tmp_path) == before
    os.utime(tmp_path / "config.json", ns=(0, 1))
    assert source_files(tmp_path) != before
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert source_files(tmp_path)["config.json"][0] == before["config.json"][0] + 6
