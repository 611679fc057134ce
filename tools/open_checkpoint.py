"""Finds out the format of the checkpoint at a path, and opens a reader of its tensors.

| format | what the folder holds |
|---|---|
| Hugging Face | config.json and safetensors, plain or in block FP8 |
| torch_dist | megatron-core's distributed format, converted or saved by a run |
| a run's checkpoint | `trainer/` (torch_dist) beside the state of the run |
| Megatron-LM's checkpoints | `latest_checkpointed_iteration.txt`; the one in torch_dist that it names is taken |
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import INDEX_NAME
from slimrl.models.architecture import FACTS_FILE, HF_SUBFOLDER, architecture_of, check_architecture
from slimrl.models.hf_config import read_hf_config

TRACKER = "latest_checkpointed_iteration.txt"
"""File of a folder of Megatron-LM's checkpoints with the number of the newest."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint of a known format."""

    format: Literal["huggingface", "torch_dist"]
    path: Path
    """Folder of the tensors; `trainer` in a run's checkpoint."""
    hf_dir: Path | None
    """Folder with the model's config.json; None if a torch_dist checkpoint has none."""

    def hf_config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            ValueError: there is none, or it is not a JSON object.
        """
        if self.hf_dir is None:
            raise ValueError(f"{self.path}: no {HF_SUBFOLDER}/config.json beside the weights; give one with --hf")
        return read_hf_config(self.hf_dir)


def find_checkpoint(path: Path, hf_dir: Path | None = None) -> FoundCheckpoint:
    """The checkpoint at a path, recognised by its files; reads no tensor.

    Args:
        hf_dir: folder with config.json, which replaces a torch_dist checkpoint's own.

    Raises:
        ValueError: no checkpoint, with what is there instead and what to give.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: {'a file' if path.exists() else 'no such folder'}; a checkpoint is a folder")
    newest = _newest_iteration(path)
    for folder in (path, path / "trainer", *([newest] if newest else [])):
        if (folder / ".metadata").is_file():
            hf = folder / HF_SUBFOLDER
            own = hf if (hf / "config.json").is_file() else None
            return FoundCheckpoint(format="torch_dist", path=folder, hf_dir=hf_dir or own)
    if (path / INDEX_NAME).is_file() or (path / "model.safetensors").is_file():
        return FoundCheckpoint(format="huggingface", path=path, hf_dir=path)
    raise ValueError(f"{path}: {_what_is_there(path)}")


def open_found(found: FoundCheckpoint) -> CheckpointReader:
    """A reader of the tensors of a checkpoint in any format, under their Hugging Face names.

    Raises:
        ValueError: it is broken, or its own architecture does not match config.json.
    """
    if found.format == "huggingface":
        return open_hf_checkpoint(found.path)
    # Imports parts of torch for which a Hugging Face checkpoint need not wait.
    from slimrl_tools.torch_dist import TorchDistCheckpoint

    check_model(found)
    return TorchDistCheckpoint(found.path, found.hf_config())


def check_model(found: FoundCheckpoint) -> None:
    """Compare the architecture that a torch_dist checkpoint records, if it does, with config.json.

    Shapes do not tell: 4 heads of 16 have the shapes of 8 heads of 8, in another layout.

    Raises:
        ValueError: with all differences.
    """
    if (found.path / FACTS_FILE).is_file():
        hf_config = found.hf_config()
        try:
            architecture = architecture_of(hf_config)
        except ValueError as error:
            raise ValueError(f"{found.hf_dir}: {error}") from error
        check_architecture(found.path, architecture)


def _newest_iteration(path: Path) -> Path | None:
    """The checkpoint that Megatron-LM's `latest_checkpointed_iteration.txt` names; None without one."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    named = tracker.read_text(errors="replace").strip()
    if not (named.isdecimal() or named == "release"):
        raise ValueError(f"{tracker}: holds {named[:40]!r}, neither an iteration nor `release`")
    return path / (named if named == "release" else f"iter_{int(named):07d}")


def _what_is_there(path: Path) -> str:
    """Description of a folder that is no checkpoint, for an error."""
    if newest := _newest_iteration(path):
        what = "which holds no .metadata; only torch_dist is read" if newest.is_dir() else "which is not there"
        return f"{TRACKER} names {newest.name}, {what}"
    below = [
        folder.relative_to(path)
        for folder in (path / "export" / "hf", *sorted(path.glob("checkpoints/step_*")), *sorted(path.glob("step_*")))
        if folder.is_dir()
    ]
    if below:
        return f"no checkpoint, but it holds {', '.join(map(str, below))}: give one of these"
    if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pth")):
        return "pickle files are not supported; save the weights as safetensors first"
    if any(path.glob("*.gguf")):
        return "a GGUF file is no checkpoint; `slimrl-tools convert gguf-to-hf` makes one of it"
    if (path / "config.json").is_file():
        return f"config.json, but neither {INDEX_NAME} nor model.safetensors"
    return "no checkpoint: neither config.json with safetensors, nor .metadata (torch_dist), nor trainer/ (of a run)"
