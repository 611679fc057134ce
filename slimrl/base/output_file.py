"""The file that a command writes at its end, which is checked before its work."""

import os
from pathlib import Path


def check_output_file(option: str, file: Path) -> None:
    """Make the folder of the file; ValueError if the file could not be written there.

    Args:
        option: that gives the file, for the error.
    """
    try:
        if file.is_dir():
            raise ValueError(f"{option} {file}: is a folder; give a file.")
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {file}: its folder cannot be made: {error.strerror}.") from error
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{option} {file}: its folder cannot be written.")
    if file.exists() and not os.access(file, os.W_OK):
        raise ValueError(f"{option} {file}: cannot be written.")
