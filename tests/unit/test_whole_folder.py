"""A folder written under a temporary name is there whole or not at all."""

import pytest

from slimrl.base.atomic import atomic_folder


def test_the_folder_has_its_name_when_it_is_whole_and_not_before(tmp_path):
    out = tmp_path / "new" / "out"
    with atomic_folder(out) as partial:
        (partial / "file").write_text("content")
        assert not out.exists()
    assert (out / "file").read_text() == "content"
    assert list(out.parent.iterdir()) == [out]


def write_and_fail(out):
    with atomic_folder(out) as partial:
        (partial / "file").write_text("content")
        raise KeyboardInterrupt


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_touched(tmp_path):
    with pytest.raises(ValueError, match="exists; it is not overwritten"), atomic_folder(tmp_path):
        raise AssertionError("nothing is to be written")
