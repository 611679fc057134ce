"""Six hundred damaged checkpoints: each is one refusal that names its folder, or has the weights that were saved.

A run's own checkpoint has a checksum of every file, so that any change is refused. Published checkpoints and torch_dist
folders have none: a value that changed without changing any shape cannot be known there, and is the one difference that
these tests let pass.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from checkpoint_mutations import linked_copy, mutate
from safetensors import safe_open
from saved_checkpoints import save
from slimrl_tools.cli import app as tools
from slimrl_tools.open_checkpoint import find_checkpoint, open_found
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from typer.testing import CliRunner

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.digests import file_digests
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import INDEX_NAME, write_safetensors
from slimrl.config.hf_config import read_stored_config
from slimrl.models.architecture import architecture_of
from slimrl.models.hf_config import published_config, published_names, write_hf_config
from slimrl.runtime.checks.checkpoint_check import WholeCheckpoint, newest_checkpoint
from slimrl.runtime.state import STATE_FILE, CheckpointFolder, RunState

SIZE = ToySize(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, moe_intermediate=16)
CPU_LIMIT_S = 10.0
"""The most that a damaged checkpoint may take; a whole one takes 0.02 s."""
LONGEST = 4000
"""Characters of a refusal; that of a config.json of another size names some tensors."""
PUBLISHED, TORCH_DIST, OF_A_RUN = 250, 150, 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One toy as a Hugging Face folder of several files (`hf`), as torch_dist (`mcore`), and in a run (`run`)."""
    root = tmp_path_factory.mktemp("whole")
    write_toy("qwen3_moe", root / "toy", SIZE, 0)
    with open_hf_checkpoint(root / "toy") as reader:
        tensors = {name: read_whole(reader, name) for name in reader.specs}
        shutil.copytree(root / "toy", root / "hf", ignore=shutil.ignore_patterns("*.safetensors*"))
        write_safetensors(root / "hf", list(reader.specs.values()), tensors.items(), max_bytes=60_000)
    arguments = ["convert", "hf-to-megatron", str(root / "hf"), str(root / "mcore"), "--shard-gb", "0.0001"]
    made = CliRunner().invoke(tools, arguments)
    assert made.exit_code == 0, made.output

    def write(folder: Path):
        linked_copy(root / "mcore", folder)
        return file_digests(folder, [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()])

    for step in (1, 2):
        save(CheckpointFolder(root / "run"), RunState(step=step, weight_version=step), 2, {"trainer": write})
    return root


@pytest.fixture(scope="module")
def weights(whole: Path) -> dict[str, torch.Tensor]:
    """The toy's weights as the safetensors library reads them."""
    found: dict[str, torch.Tensor] = {}
    for file in (whole / "hf").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return found


def refusal_of(read: Callable[[], None], folder: Path, about: str) -> str:
    """What is said of a checkpoint that is refused; empty for one that is read."""
    started = time.process_time()
    try:
        read()
    except ValueError as error:
        said = str(error)
        assert str(folder) in said, f"{about}: {said}"
        assert len(said) < LONGEST, f"{about}: {said[:500]}"
        return said
    finally:
        assert time.process_time() - started < CPU_LIMIT_S, about
    return ""


@pytest.mark.parametrize(("kind", "number"), [("hf", PUBLISHED), ("mcore", TORCH_DIST)])
def test_a_damaged_checkpoint_is_refused_or_has_every_weight_in_its_shape(
    whole: Path, weights: dict[str, torch.Tensor], tmp_path: Path, kind: str, number: int
):
    refused, other, rest = 0, 0, 0
    for mutant in range(number):
        rng, folder = Random(f"{kind} {mutant}"), tmp_path / f"mutant_{mutant}"
        about = f"mutant {mutant}: {mutate(rng, linked_copy(whole / kind, folder))}"
        read: dict[str, torch.Tensor] = {}

        def read_all(folder: Path = folder, read: dict[str, torch.Tensor] = read) -> None:
            if kind == "hf":
                check_checkpoint(folder)
            with open_found(find_checkpoint(folder)) as reader:
                read |= {name: read_whole(reader, name) for name in reader.specs}

        if refusal_of(read_all, folder, about):
            refused += 1
        else:
            assert read.keys() == weights.keys(), about
            assert all(tensor.shape == weights[name].shape for name, tensor in read.items()), about
            if any(not torch.equal(tensor, weights[name]) for name, tensor in read.items()):
                # Without a checksum nobody can know it; `mcore` has two files of the same shapes.
                assert about.split()[2] == "flipped" or (kind == "mcore" and about.split()[2] == "swapped"), about
                other += 1
            else:
                rest += 1
        shutil.rmtree(folder)
    assert min(refused, other, rest) > 0
    assert refused > number // 3


def test_a_damaged_checkpoint_of_a_run_is_refused_and_the_one_before_is_offered(whole: Path, tmp_path: Path):
    refused = 0
    for mutant in range(OF_A_RUN):
        run = tmp_path / f"run_{mutant}"
        linked_copy(whole / "run", run)
        newest, before = run / "step_000002", run / "step_000001"
        about = f"mutant {mutant}: {mutate(Random(f'run {mutant}'), newest)}"
        found = []

        def read(run: Path = run, found: list[WholeCheckpoint | None] = found) -> None:
            found.append(newest_checkpoint(CheckpointFolder(run), contents=True))

        said = refusal_of(read, run, about)
        if said:
            refused += 1
            assert said.startswith(f"{newest} is damaged:\n  "), about
            assert f"{before} is intact. To continue from there, move the damaged away" in said, about
        else:
            assert (found[0].path, found[0].state) == (newest, RunState(step=2, weight_version=2)), about
            assert same_files(whole / "run" / "step_000002", newest), about
        shutil.rmtree(run)
    assert refused > OF_A_RUN * 3 // 4


def same_files(one: Path, other: Path) -> bool:
    """Whether all files of a folder are in another as they are; how the state is written may differ."""
    names = [file.relative_to(one) for file in one.rglob("*") if file.is_file()]
    return all(
        json.loads((other / name).read_bytes()) == json.loads((one / name).read_bytes())
        if name.name == STATE_FILE
        else (other / name).read_bytes() == (one / name).read_bytes()
        for name in names
    )


def test_a_state_that_says_nothing_is_damaged(whole: Path, tmp_path: Path):
    run = linked_copy(whole / "run", tmp_path / "run")
    for content in (b"{}", b"[]", b"null", b"[" * 100_000, b"", b'{"files": null, "xxh3_128": null}'):
        (run / "step_000002" / STATE_FILE).unlink()
        (run / "step_000002" / STATE_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=r"step_000002 is damaged:\n  state\.json: damaged: "):
            newest_checkpoint(CheckpointFolder(run), contents=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "config.json: not JSON: not UTF-8"),
        (lambda folder: (folder / "config.json").write_bytes(b"[" * 100_000), "config.json: not JSON that can be read"),
        (lambda folder: (folder / INDEX_NAME).write_bytes(b"[" * 100_000), "not an index of safetensors"),
        (lambda folder: set_in(folder / "config.json", num_experts={"a": 1}), 'num_experts is {"a": 1}, not a count'),
        (lambda folder: set_in(folder / "config.json", head_dim=True), "head_dim is true, not a count"),
    ],
)
def test_a_command_refuses_with_the_exit_code_of_wrong_input(whole: Path, tmp_path: Path, change, says: str):
    folder = shutil.copytree(whole / "hf", tmp_path / "hf")
    change(folder)
    for arguments in (["inspect", folder], ["verify", whole / "hf", folder], ["quantize", folder, tmp_path / "out"]):
        result = CliRunner().invoke(tools, list(map(str, arguments)))
        assert result.exit_code == 2, result.output
        assert says in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_process_of_the_command_prints_no_traceback(whole: Path, tmp_path: Path):
    folder = linked_copy(whole / "mcore", tmp_path / "mcore")
    (folder / ".metadata").unlink()
    (folder / ".metadata").write_bytes((whole / "mcore" / ".metadata").read_bytes()[:1000])
    command = [
        sys.executable,
        "-m",
        "slimrl_tools.cli",
        "convert",
        "megatron-to-hf",
        str(folder),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False)
    assert done.returncode == 2
    said = (done.stderr + done.stdout).decode()
    assert f"{folder / '.metadata'}: cannot be read: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", published_names())
def test_every_published_config_has_counts_where_there_must_be_some(tmp_path: Path, name: str):
    write_hf_config(tmp_path, published_config(name))
    assert architecture_of(published_config(name))
    assert read_stored_config(tmp_path)


def set_in(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
