"""What several unit tests begin with. Imports stand inside: the process that only hands out files reads this too."""

import json
import time
from pathlib import Path

import pytest


def pytest_unconfigure() -> None:
    """Tools that tests left hanging come back before the interpreter ends, which they would abort."""
    from slimrl.base.threads import task_threads

    deadline = time.monotonic() + 10
    for thread in task_threads():
        thread.join(max(0.0, deadline - time.monotonic()))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A random Qwen3-MoE, the same each time."""
    from slimrl_tools.toy.toy import write_toy
    from toy_tools import SMALL

    write_toy("qwen3_moe", tmp_path / "toy", SMALL, seed=1)
    return tmp_path / "toy"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 kB in versions, so that a tensor of a test has several."""
    from slimrl.checkpoints.versions import codec

    for module in ("codec", "local_copy"):
        monkeypatch.setattr(f"slimrl.checkpoints.versions.{module}.BLOCK_BYTES", 4096)
    assert codec.BLOCK_BYTES == 4096


@pytest.fixture
def in_process_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of peer groups find each other within the process: torch asks the name server for each connection."""
    from datetime import timedelta

    import torch.distributed as dist

    from slimrl.resync.p2p import peer_group

    stores = {}

    def store_of(spec):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=spec.timeout_s))
        return stores.setdefault(spec.port, store)

    monkeypatch.setattr(peer_group, "connect_store", store_of)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What a version takes of a checkpoint besides the weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "hidden_size": 8}))
    (folder / "tokenizer.json").write_text("{}")
    return folder
