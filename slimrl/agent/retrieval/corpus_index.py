"""What is computed once from a corpus and kept beside it: a folder `wiki.jsonl.index/KIND` for `wiki.jsonl`.

1. Its `index.json` says of which corpus it is (bytes, SHA-256, time of the last change), what else it depends on, and
   has the size and the CRC-32 of every file.
2. It is used if all of that agrees. The corpus is only hashed if its time has changed, as that of a copy.
3. It is written under another name and renamed when complete. A lock lets one process of several write it, and the
   others wait.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimrl.base.atomic import atomic_folder, write_whole
from slimrl.base.folder_lock import folder_lock

MANIFEST = "index.json"
WAIT_S = 3600.0
"""Longest wait for another process that writes the same index."""
_READ_BYTES = 1 << 20


class ForeignFolder(ValueError):
    """Something else lies where an index is kept; it is neither used nor removed."""


def folder_of(corpus: Path, kind: str) -> Path:
    return corpus.with_name(f"{corpus.name}.index") / kind


def index_problem(folder: Path, corpus: Path, made_with: Mapping[str, Any]) -> str | None:
    """Why a folder is no index of the corpus as it is now; None if it is one.

    Args:
        made_with: what the index depends on besides the corpus; plain JSON.

    Raises:
        ForeignFolder: it has no manifest of an index.
        OSError: a file cannot be read.
    """
    if not folder.exists():
        return "there is no index"
    manifest = _manifest(folder)
    if (told := manifest["made_with"]) != made_with:
        return f"the index was made with {told}, not with {dict(made_with)}"
    if not _is_of(manifest["corpus"], corpus):
        return f"{corpus} is not what the index was made of"
    for name, (num_bytes, crc) in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != num_bytes or _crc32(file) != crc:
            return f"{name} is missing or damaged"
    return None


def write_index(folder: Path, corpus: Path, made_with: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Write an index, in the place of an older one. The caller holds the lock of the folder above.

    Args:
        write: writes the files into the folder that it is given.

    Raises:
        ForeignFolder: something else lies there.
    """
    if folder.exists():
        _manifest(folder)
        shutil.rmtree(folder)
    stamp = _stamp(corpus)
    with atomic_folder(folder) as partial:
        write(partial)
        files = {file.name: [file.stat().st_size, _crc32(file)] for file in sorted(partial.iterdir())}
        manifest = {"made_with": dict(made_with), "corpus": {**stamp, "sha256": _sha256(corpus)}, "files": files}
        write_whole(partial / MANIFEST, json.dumps(manifest, indent=1))
        if _stamp(corpus) != stamp:
            raise ValueError(f"{corpus} was changed while its index was made")


def locked(folder: Path) -> Any:
    """A context in which no other process writes an index of the same corpus.

    Raises:
        OSError: the folder above cannot be made.
        ValueError: another process holds the lock for too long, or the folder above cannot be written.
    """
    folder.parent.mkdir(exist_ok=True)
    return folder_lock(folder.parent, wait_s=WAIT_S)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest.keys() == {"made_with", "corpus", "files"}:
            return dict(manifest)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, json.JSONDecodeError, AttributeError):
        pass
    raise ForeignFolder(f"{folder} is no index: it has no whole {MANIFEST}. Remove it, and the index is made")


def _is_of(told: Mapping[str, Any], corpus: Path) -> bool:
    stamp = _stamp(corpus)
    if told["bytes"] != stamp["bytes"]:
        return False
    return bool(told["mtime_ns"] == stamp["mtime_ns"] or told["sha256"] == _sha256(corpus))


def _stamp(corpus: Path) -> dict[str, int]:
    status = corpus.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while part := stream.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return crc
