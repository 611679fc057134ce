"""Processes download a model from a stand-in for the Hugging Face Hub, once per node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

UNREACHABLE = "http://127.0.0.1:9"


def fetching(call: str, home: Path, url: str) -> subprocess.Popen[str]:
    """A process that prints what `call` returns, or its error."""
    code = f"from slimrl.config.hub import *\ntry:\n    print({call})\nexcept ValueError as error:\n    print(error)"
    variables = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
    variables.pop("HF_HUB_OFFLINE", None)
    return subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0].strip()


FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"other weights",
    "README.md": b"read me",
    "original/consolidated.safetensors": b"weights again",
}
READ = {"config.json", "model.safetensors", "tokenizer.json"}


def test_processes_of_a_node_fetch_each_file_once_and_only_what_is_read(tmp_path):
    with serving(FakeHub("org/mine", FILES)) as fake:
        home = tmp_path / "driver"
        folder = home / "hub" / "models--org--mine" / "snapshots" / COMMIT
        config = "fetch(HubModel(model_id='org/mine'), CONFIG_FILES)"
        assert said(fetching(config, home, fake.url)) == str(folder)
        assert fake.downloads == {"config.json": 1}
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        # As on another node: the folder that the driver has belongs to its cache, and a part of it is there.
        call = f"fetch_to_this_node({str(folder)!r})"
        assert [said(process) for process in [fetching(call, home, fake.url) for _ in range(3)]] == ["None"] * 3
        assert fake.downloads == dict.fromkeys(READ, 1)
        assert {name: (folder / name).read_bytes() for name in READ} == {name: FILES[name] for name in READ}
        # From then on no network is asked.
        assert said(fetching(call, home, UNREACHABLE)) == "None"
        assert said(fetching("fetch(HubModel(model_id='org/mine'))", home, UNREACHABLE)) == str(folder)


def test_a_model_that_the_hub_does_not_have_and_an_interrupted_download_are_named(tmp_path):
    with serving(FakeHub("org/mine", FILES)) as fake:
        refused = said(fetching("fetch(HubModel(model_id='org/other'))", tmp_path, fake.url))
        assert refused.startswith("org/other: no such folder, and the Hugging Face Hub does not give it out.")
        assert "HF_TOKEN" in refused
        said(fetching("fetch(HubModel(model_id='org/mine'), CONFIG_FILES)", tmp_path, fake.url))
    part = said(fetching("fetch(HubModel(model_id='org/mine'))", tmp_path, UNREACHABLE))
    assert part.startswith(f"org/mine: no such folder, not whole in the cache {tmp_path / 'hub'}, and the Hugging Face")
