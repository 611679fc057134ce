"""A folder as the bytes of a tar file, for sandboxes that do not see the files of this machine."""

import io
import tarfile
from pathlib import Path


def packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


def unpacked(archive: bytes, folder: Path) -> None:
    """Write the files below an existing folder; owners and links that lead out of it are refused."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")
