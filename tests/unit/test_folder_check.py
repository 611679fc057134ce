"""A folder that several nodes share is tried by all of them at once."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import StageError
from slimrl.config.env_vars import thread_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.runtime.checks import folder_check
from slimrl.runtime.checks.folder_check import check_nodes, why_not_writable
from slimrl.runtime.cluster.placement import Node, Placement, Slot


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


def test_the_folder_itself_is_written_and_what_others_may_use_is_kept(tmp_path, monkeypatch):
    writes = tempfile.TemporaryFile

    def full(**options):
        if options.get("dir") == tmp_path / "full":
            raise OSError(28, "No space left on device")
        return writes(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert why_not_writable(tmp_path / "full") == "No space left on device"
    assert list(tmp_path.iterdir()) == []
    assert why_not_writable(tmp_path / "deep" / "local", keep=True) == ""
    assert (tmp_path / "deep" / "local").is_dir()
    assert why_not_writable(tmp_path / "deep" / "local" / "more") == ""
    # Only what this made is removed.
    assert (tmp_path / "deep" / "local").is_dir()


NODES = [Node(node_id=name, name=name, address=name, slots=2) for name in ("a", "b", "c")]


def reservation(ranks: str, engines: str):
    """A place on the node of each letter."""
    slots = {node.name: Slot(node=node, number=0) for node in NODES}
    placement = Placement(ranks=tuple(slots[n] for n in ranks), engines=tuple((slots[n], slots[n]) for n in engines))
    return SimpleNamespace(placement=placement, options=lambda slot, threads: {"slot": slot, "threads": threads})


@pytest.mark.parametrize(
    ("transport", "ranks", "engines", "asked"),
    [
        ("delta", "ab", "bcc", ["a", "b", "c"]),
        ("delta", "aab", "a", ["a"]),
        ("delta", "", "a", []),
        ("delta", "a", "", []),
        ("disk", "a", "b", []),
    ],
)
def test_the_nodes_of_engines_and_of_the_first_rank_try_the_local_folder_of_delta(
    monkeypatch, transport, ranks, engines, asked
):
    tried, reasons = [], {}

    def options(*, slot, threads):
        return SimpleNamespace(remote=lambda folder: tried.append((slot.node.name, threads, folder)) or slot.node.name)

    def get(refs, timeout):
        assert timeout == folder_check.NODES_TIMEOUT_S
        return [reasons.get(ref, "") for ref in refs]

    monkeypatch.setattr(folder_check, "_why_not_writable", SimpleNamespace(options=options))
    monkeypatch.setattr(folder_check.ray, "get", get)
    recipe = Recipe()
    recipe.resync.transport, recipe.resync.local_dir = TransportName(transport), "local"
    check_nodes(recipe, reservation(ranks, engines), [])
    assert sorted(tried) == [(name, thread_variables(1), Path("local").absolute()) for name in asked]
    if asked:
        reasons |= {"a": "Permission denied"}
        with pytest.raises(StageError, match=r"resync\.local_dir: .*local cannot be written on a: Permission denied$"):
            check_nodes(recipe, reservation(ranks, engines), [])

        def lost(refs, timeout):
            raise folder_check.ray.exceptions.GetTimeoutError("60 s")

        monkeypatch.setattr(folder_check.ray, "get", lost)
        with pytest.raises(StageError, match=r"nodes did not try .*local: GetTimeoutError"):
            check_nodes(recipe, reservation(ranks, engines), [])


def test_spare_nodes_try_the_local_folder_of_delta_too(monkeypatch):
    asked = []

    def options(**how):
        asked.append(how.get("slot") or how["scheduling_strategy"])
        return SimpleNamespace(remote=lambda folder: folder)

    monkeypatch.setattr(folder_check, "_why_not_writable", SimpleNamespace(options=options))
    monkeypatch.setattr(folder_check, "NodeAffinitySchedulingStrategy", lambda node_id, *, soft: node_id)
    monkeypatch.setattr(folder_check.ray, "get", lambda refs, timeout: ["", "Read-only file system"])
    recipe = Recipe()
    recipe.resync.transport = TransportName("delta")
    with pytest.raises(StageError, match=r"cannot be written on c: Read-only file system$"):
        check_nodes(recipe, reservation("a", "a"), NODES[2:])
    assert asked == [Slot(node=NODES[0], number=0), "c"]


@pytest.mark.parametrize(
    ("command", "transport", "shared_only", "bad", "keys"),
    [
        ("train", "delta", False, ("runs", "versions", "local"), ["run.dir", "resync.dir", "resync.local_dir"]),
        ("train", "delta", True, ("runs", "versions", "local"), ["run.dir", "resync.dir"]),
        ("train", "disk", False, ("runs", "versions", "local"), ["run.dir", "resync.dir"]),
        ("resync bench", "disk", False, ("versions",), ["resync.dir"]),
        ("train", "ipc", False, ("runs", "versions", "local"), ["run.dir"]),
        ("sft", "disk", False, ("runs", "versions", "local"), ["run.dir"]),
        ("train", "delta", False, (), []),
    ],
)
def test_the_folders_that_a_command_writes_into_are_tried(tmp_path, command, transport, shared_only, bad, keys):
    (tmp_path / "file").touch()
    paths = {name: str(tmp_path / ("file" if name in bad else "good") / name) for name in ("runs", "versions", "local")}
    recipe = Recipe()
    recipe.run.dir, recipe.resync.dir, recipe.resync.local_dir = paths.values()
    recipe.resync.transport = TransportName(transport)
    loaded = SimpleNamespace(recipe=recipe, command=command, problem=lambda key, message: (key, message))
    found = folder_check.folder_problems(loaded, shared_only=shared_only)
    assert [key for key, _ in found] == keys
    assert all("cannot be written: Not a directory." in message for _, message in found)
    assert not (tmp_path / "good").exists()
