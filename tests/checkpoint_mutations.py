"""Folders of a checkpoint with one thing wrong, by seed: what disks, copies and downloads do to files."""

import json
import os
import shutil
from pathlib import Path
from random import Random

from json_paths import paths

JSON_VALUES = (
    None,
    True,
    -1,
    0,
    3,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "F32",
    [],
    [1],
    [-1, 4],
    {},
    {"a": 1},
    "../x",
    [[]],
)
"""What may stand in place of any value"""


def linked_copy(folder: Path, copy: Path) -> Path:
    """A copy whose files share their bytes with the folder's, until `mutate` replaces them."""
    shutil.copytree(folder, copy, copy_function=os.link)
    return copy


def mutate(rng: Random, folder: Path) -> str:
    """Change a folder of linked files; returns what was done."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    name = rng.choice(files)
    file = folder / name
    content = file.read_bytes()
    match rng.randrange(10):
        case 0 | 1:
            place = rng.randrange(len(content) if rng.random() < 0.3 else min(len(content), 2000))
            flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
            _replace(file, content[:place] + flipped + content[place + 1 :])
            return f"flipped byte {place} of {name}"
        case 2:
            length = rng.choice([0, 1, 7, 8, rng.randrange(len(content)), len(content) - 1])
            _replace(file, content[:length])
            return f"cut {name} to {length}"
        case 3:
            other = rng.choice(files)
            swapped = (folder / other).read_bytes()
            _replace(folder / other, content)
            _replace(file, swapped)
            return f"swapped {name} and {other}"
        case 4:
            file.unlink()
            return f"removed {name}"
        case 5:
            (folder / rng.choice(["extra.bin", "model.safetensors", "model-00009-of-00009.safetensors"])).write_bytes(
                content
            )
            return f"added a copy of {name}"
        case 6:
            _replace(file, content + rng.choice([b"\0", b"\n", b"more", content[:100]]))
            return f"lengthened {name}"
        case 7:
            file.unlink()
            file.mkdir()
            return f"made {name} a folder"
        case _:
            structured = [one for one in files if one.endswith((".json", ".safetensors"))]
            return _in_json(rng, folder, rng.choice(structured))


def _in_json(rng: Random, folder: Path, name: str) -> str:
    """Another value at a random place of a JSON file, or of a header of safetensors."""
    file = folder / name
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else 0
    header, rest = (content[8 : 8 + length], content[8 + length :]) if length else (content, b"")
    value = json.loads(header)
    path = rng.choice(paths(value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.05:
        raw = b"[" * 100_000
    else:
        if not path:
            value = rng.choice(JSON_VALUES)
        elif rng.random() < 0.3:
            del holder[path[-1]]
        elif rng.random() < 0.3 and isinstance(holder, dict):
            holder[path[-1]] = holder[rng.choice(list(holder))]
        else:
            holder[path[-1]] = rng.choice(JSON_VALUES)
        raw = json.dumps(value).encode()
    _replace(file, (len(raw).to_bytes(8, "little") if length else b"") + raw + rest)
    return f"changed {'.'.join(map(str, path)) or 'all'} in {name}"


def _replace(file: Path, content: bytes) -> None:
    """A new file under the name: the old one's bytes are also another folder's."""
    file.unlink()
    file.write_bytes(content)
