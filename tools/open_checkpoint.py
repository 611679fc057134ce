"""Any checkpoint by its path: which format it has, where its parts lie, and a reader of its tensors.

| format | what the folder holds |
|---|---|
| Hugging Face | config.json and safetensors, plain or in block FP8 |
| torch_dist | megatron-core's distributed format, converted or saved by a run |
| a run's checkpoint | `trainer/` (torch_dist) beside the state of the run |
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slimrl.models.architecture import FACTS_FILE, HF_SUBFOLDER, architecture_of, check_architecture
from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import read_hf_config
from slimrl.models.safetensors_folder import INDEX_NAME


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """What lies at a path."""

    format: Literal["huggingface", "torch_dist"]
    path: Path
    """Folder that holds the tensors; below the given one for a run's checkpoint."""
    hf_dir: Path | None
    """Folder with the model's config.json; None where a torch_dist checkpoint was saved without."""

    def hf_config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            ValueError: there is none, or it is not a JSON object.
        """
        if self.hf_dir is None:
            raise ValueError(f"{self.path}: no {HF_SUBFOLDER}/config.json beside the weights; give one with --hf")
        return read_hf_config(self.hf_dir)


def find_checkpoint(path: Path, hf_dir: Path | None = None) -> FoundCheckpoint:
    """The checkpoint at a path, told by the files in it; no tensor is read.

    Args:
        hf_dir: folder with the config.json of a torch_dist checkpoint, instead of its own if it has one.

    Raises:
        ValueError: no checkpoint is there, saying what is there instead and what to give.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: {'a file' if path.exists() else 'no such folder'}; a checkpoint is a folder")
    for folder in (path, path / "trainer"):
        if (folder / ".metadata").is_file():
            beside = folder / HF_SUBFOLDER
            own = beside if (beside / "config.json").is_file() else None
            return FoundCheckpoint(format="torch_dist", path=folder, hf_dir=hf_dir or own)
    if (path / INDEX_NAME).is_file() or (path / "model.safetensors").is_file():
        return FoundCheckpoint(format="huggingface", path=path, hf_dir=path)
    raise ValueError(f"{path}: {_what_is_there(path)}")


def open_checkpoint(path: Path, hf_dir: Path | None = None) -> CheckpointReader:
    """A reader of the tensors of a checkpoint in any format, under their Hugging Face names.

    Raises:
        ValueError: no checkpoint is there, or it is broken.
    """
    return open_found(find_checkpoint(path, hf_dir))


def open_found(found: FoundCheckpoint) -> CheckpointReader:
    """The same of a checkpoint that was found already.

    Raises:
        ValueError: it is broken, or says itself that it is of another model than its config.json.
    """
    if found.format == "huggingface":
        return open_hf_checkpoint(found.path)
    # Imports Megatron, which takes seconds.
    from slimrl.trainer.torch_dist import TorchDistCheckpoint

    check_model(found)
    return TorchDistCheckpoint(found.path, found.hf_config())


def check_model(found: FoundCheckpoint) -> None:
    """Whether a torch_dist checkpoint is of the model of its config.json, where it says of which it is.

    Tensors do not tell: 4 heads of 16 have the shapes of 8 heads of 8, and are laid out otherwise.

    Raises:
        ValueError: naming every fact that differs.
    """
    if (found.path / FACTS_FILE).is_file():
        check_architecture(found.path, architecture_of(found.hf_config()))


def _what_is_there(path: Path) -> str:
    """Of a folder that is no checkpoint."""
    below = [
        folder.relative_to(path)
        for folder in (path / "export" / "hf", *sorted(path.glob("checkpoints/step_*")), *sorted(path.glob("step_*")))
        if folder.is_dir()
    ]
    if below:
        return f"not a checkpoint itself; it holds {', '.join(map(str, below))}: give one of these"
    if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pth")):
        return "weights in pickle files, which are not read; save them as safetensors first"
    if any(path.glob("*.gguf")):
        return "a GGUF file, which is not read; give the Hugging Face checkpoint that it was made of"
    if (path / "config.json").is_file():
        return f"config.json, but neither {INDEX_NAME} nor model.safetensors"
    return "no checkpoint: neither config.json with safetensors, nor .metadata (torch_dist), nor trainer/ (of a run)"
