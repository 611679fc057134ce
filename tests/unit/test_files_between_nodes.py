"""Files of checkpoints that go from node to node, without a cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint import FileSystemReader

from slimrl.checkpoints.digests import file_digest
from slimrl.runtime.cluster import node_memory
from slimrl.runtime.cluster.node_memory import Fetched, NodeMemory
from slimrl.trainer.checkpointing.fetching import fetching


class Remote:
    """An actor whose methods are called at once."""

    def __init__(self, memory: NodeMemory) -> None:
        self.memory, self.calls = memory, []

    def __getattr__(self, name: str):
        def remote(*given):
            self.calls.append((name, *given))
            return getattr(self.memory, name)(*given)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(node_memory, "PIECE_BYTES", 4)
    monkeypatch.setattr(node_memory.ray, "get", lambda value, timeout=None: value)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(Remote(NodeMemory(tmp_path / name)))
    return found


def fill(remote: Remote, name: str, text: str) -> None:
    file = remote.memory.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_file_comes_in_pieces_and_once(nodes):
    first, second = nodes
    fill(first, "step_000004/trainer/__0_0.distcp", "0123456789")
    for _ in range(2):
        second.memory.fetch(["step_000004/trainer/__0_0.distcp"], first)
    assert (second.memory.path / "step_000004/trainer/__0_0.distcp").read_text() == "0123456789"
    assert [call[2] for call in first.calls] == [0, 4, 8, 10]
    digests = second.memory.digests("step_000004")
    assert digests == first.memory.digests("step_000004")
    assert digests == {name: file_digest(first.memory.path / name) for name in ["step_000004/trainer/__0_0.distcp"]}


def test_half_a_file_counts_for_nothing(nodes, monkeypatch):
    first, second = nodes
    fill(first, "step_000004/a", "0123456789")

    def lost(name: str, start: int) -> bytes:
        if start == 8:
            raise OSError("the node is lost")
        return b"0123"

    monkeypatch.setattr(first.memory, "piece", lost)
    with pytest.raises(OSError, match="is lost"):
        second.memory.fetch(["step_000004/a"], first)
    assert second.memory.digests("step_000004") == {}
    # It would fill a /dev/shm that is full for good.
    assert files(second.memory.path / "step_000004") == []


def test_a_file_that_is_gone_or_does_not_count_is_copied_again(nodes):
    """The driver removes folders that its node's actor has filled, which is not asked to."""
    first, second = nodes
    fill(first, "step_000004/a", "old")
    second.memory.fetch(["step_000004/a"], first)
    fill(first, "step_000004/a", "new")
    (second.memory.path / "step_000004/a").unlink()
    second.memory.fetch(["step_000004/a"], first)
    assert (second.memory.path / "step_000004/a").read_text() == "new"
    (second.memory.path / "step_000004/a").write_text("damaged")
    assert second.memory.digests("step_000004") != first.memory.digests("step_000004")
    second.memory.fetch(["step_000004/a"], first)
    assert (second.memory.path / "step_000004/a").read_text() == "new"


def test_a_node_makes_no_folder_without_the_room_that_its_ranks_took_last(nodes, monkeypatch):
    memory, free = nodes[0].memory, 0
    monkeypatch.setattr(node_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    memory.make(".partial_step_000004")
    fill(nodes[0], ".partial_step_000004/a", "0123456789")
    memory.rename(".partial_step_000004", "step_000004")
    with pytest.raises(OSError, match=r"^it takes 0\.0 GiB of .*, and 0\.0 are free$"):
        memory.make(".partial_step_000005")
    assert files(memory.path) == ["step_000004"]
    free = 10
    memory.make(".partial_step_000005")


def test_a_folder_that_is_written_again_has_none_of_its_old_files(nodes):
    first, second = nodes
    fill(first, "step_000004/b", "old")
    second.memory.fetch(["step_000004/b"], first)
    second.memory.make(".partial_step_000004")
    fill(second, ".partial_step_000004/a", "new")
    assert second.memory.rename(".partial_step_000004", "step_000004") == ["step_000004/a"]
    fill(first, "step_000004/b", "new")
    second.memory.fetch(["step_000004/b"], first)
    assert (second.memory.path / "step_000004/b").read_text() == "new"
    second.memory.keep(["step_000005"])
    assert list(second.memory.path.iterdir()) == []
    assert (second.memory._fetched, second.memory._locks) == (set(), {})


def test_small_files_are_fetched_at_once_and_shards_when_they_are_read(nodes, monkeypatch):
    first, second = nodes
    names = ("common.pt", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
    for name in names:
        fill(first, f"step_000004/trainer/{name}", name)
    fill(second, "step_000004/trainer/__1_0.distcp", "own")
    missing = {name: first for name in names if not name.startswith("__1")}
    fetch = Fetched(second, "step_000004/trainer", missing, 1.0)
    there = second.memory.path / "step_000004" / "trainer"
    read = []
    monkeypatch.setattr(FileSystemReader, "read_data", lambda self, plan, planner: read.append(sorted(files(there))))
    reader = FileSystemReader(there)
    reader.storage_data = {name: SimpleNamespace(relative_path=name) for name in names}
    plan = SimpleNamespace(items=[SimpleNamespace(storage_index=name) for name in names[1:3]])
    with fetching(fetch):
        assert sorted(files(there)) == ["__1_0.distcp", "common.pt"]
        reader.read_data(plan, None)
    assert read == [["__0_0.distcp", "__1_0.distcp", "common.pt"]]
    assert (there / "__1_0.distcp").read_text() == "own"
    reader.read_data(SimpleNamespace(items=[SimpleNamespace(storage_index="__2_0.distcp")]), None)
    assert not (there / "__2_0.distcp").exists()


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
