"""A folder that several nodes share is tried by all of them at once."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

from slimrl.runtime.folder_check import why_not_writable


def test_two_that_try_one_folder_at_once_do_not_refuse_each_other(tmp_path, monkeypatch):
    folder, writes = tmp_path / "deep" / "local", tempfile.TemporaryFile
    made, found, first_done = threading.Event(), threading.Event(), threading.Event()

    def write(**options):
        """The first makes the folder; it is done when the second has found it and is about to write into it."""
        if not made.is_set():
            made.set()
            assert found.wait(10)
        else:
            found.set()
            assert first_done.wait(10)
        return writes(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", write)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(why_not_writable, folder, keep=True)
        assert made.wait(10)
        second = pool.submit(why_not_writable, folder, keep=True)
        assert first.result(20) == ""
        first_done.set()
        assert second.result(20) == ""
    assert list(folder.iterdir()) == []


def test_alone_what_was_made_is_removed_and_the_reason_is_the_systems(tmp_path):
    assert why_not_writable(tmp_path / "deep" / "local") == ""
    (tmp_path / "file").touch()
    assert why_not_writable(tmp_path / "file" / "local") == "Not a directory"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
