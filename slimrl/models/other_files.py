"""What lies beside the weights of a Hugging Face checkpoint and goes with them wherever they go. Torch-free."""

import shutil
from pathlib import Path

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
)
"""Of files that hold weights, in whatever format, or list such files."""


def copy_other_files(src: Path, out: Path) -> None:
    """Copy tokenizer, generation config, licence and code from a checkpoint; not config.json, nor subfolders."""
    for file in sorted(src.iterdir()):
        plain = file.is_file() and not file.name.startswith(".") and file.name != "config.json"
        if plain and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, out / file.name)
