"""The removal of a command's workspace."""

import os
import shutil
from pathlib import Path

import pytest

from slimrl.agent.gateway import workspace


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_closed_folders_are_removed_the_workspace_s_own_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def rmtree(path: Path) -> None:
        modes.extend(map(mode, folders))
        removed(path)

    modes, removed = list[int](), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    root = tmp_path / "root"
    folders = [root, root / "work", root / "work" / "a", root / "work" / "a" / "b"]
    folders[-1].mkdir(parents=True)
    (folders[-1] / "file").touch()
    for folder in reversed(folders):
        folder.chmod(0)
    workspace._remove(root)
    assert modes == [0o700] * 4  # root could empty them anyway
    assert not root.exists()


def test_the_target_of_a_link_that_takes_a_folder_s_place_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os.path, "islink", lambda path: False)  # as it was a moment before
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").touch()
    others.chmod(0o500)
    root = tmp_path / "root"
    (root / "work").mkdir(parents=True)
    (root / "work" / "link").symlink_to(others)
    workspace._remove(root)
    assert not root.exists()
    assert (mode(others), (others / "file").exists()) == (0o500, True)
