"""Data files with something wrong, by seed: what editors, copies and full disks do to lines of JSON and to files."""

import json
from random import Random
from typing import Any

from json_paths import paths

VALUES = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    10**400,
    1e39,
    float("nan"),
    "",
    "1",
    "\x00",
    "é",
    [],
    [[]],
    [1],
    {},
    {"a": 1},
)
TEXTS = (
    b"\xff", b"\xc3(", b"\x00", b"\xef\xbb\xbf", b"\r", b"\x1a", b"\\ud800", b"\\u0000", b"NaN", b"1e999", b"[" * 2000,
    b'"', b"}",
    b"\n", b"{", b"//", b"9" * 5000, b",", b"'", b"\xe2\x80\xa8",
)  # fmt: skip


def mutated_lines(rng: Random, lines: list[bytes]) -> bytes:
    """The lines of a file, one of them or their order changed."""
    lines, number = list(lines), rng.randrange(len(lines))
    line = lines[number]
    place = rng.randrange(len(line))
    match rng.randrange(11):
        case 0 | 1:
            lines[number] = line[:place] + rng.choice(TEXTS) + line[place + rng.randrange(2) :]
        case 2:
            lines[number] = line[:place] + bytes([line[place] ^ 1 << rng.randrange(8)]) + line[place + 1 :]
        case 3:
            return b"\n".join(lines)[: rng.randrange(sum(map(len, lines)))]
        case 4:
            lines[number] = line[:place] + b"\n" + line[place:]
        case 5:
            lines.insert(number, rng.choice([b"", b" ", b"null", b"[]", b"{}", b"{}" * 2, b"---", b"\x00" * 4096]))
        case 6:
            key = json.loads(line).popitem()[0]
            lines[number] = line[:-1] + f', "{key}": 1}}'.encode()
        case 7:
            lines[number] = b"[" + line + b"]"
        case _:
            lines[number] = json.dumps(_with_another_value(rng, json.loads(line))).encode()
    return b"\n".join(lines) + rng.choice([b"\n", b"", b"\r\n", b"\n\n"])


def _with_another_value(rng: Random, value: Any) -> Any:
    path = rng.choice(paths(value)[1:])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    match rng.randrange(4):
        case 0:
            del holder[path[-1]]
        case 1 if isinstance(holder, dict):
            holder[rng.choice([f"{path[-1]}s", "tokens", "label", "content", "x"])] = rng.choice(VALUES)
        case _:
            holder[path[-1]] = rng.choice(VALUES)
    return value


def damaged(rng: Random, content: bytes) -> bytes:
    """A file with a flipped bit, without its end or a part, with a part twice, or with something behind it."""
    place, other = sorted(rng.randrange(len(content)) for _ in range(2))
    match rng.randrange(5):
        case 0 | 1:
            return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        case 2:
            return content[:place]
        case 3:
            return content[:place] + content[other:]
        case _:
            return content + content[place:other] + b"\0"
