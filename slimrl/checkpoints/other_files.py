"""Files of a Hugging Face checkpoint besides its weights: tokenizer, licence, code. Torch-free."""

import shutil
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Suffixes of files with weights in any format, and of their indices."""


def copy_other_files(src: Path, out: Path) -> None:
    """Copy tokenizer, generation config, licence and code of a checkpoint; neither config.json nor subfolders."""
    for file in sorted(src.iterdir()):
        plain = file.is_file() and not file.name.startswith(".") and file.name != "config.json"
        if plain and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, out / file.name)
