"""Another user of the machine: a child process that has given up root's rights."""

import encodings.idna  # noqa: F401 (for sockets; nobody may read the folder that it lies in)
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def as_nobody(act: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `act`, of plain values, in a child process of the user nobody."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens, this process must not go on as the test.
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with os.fdopen(writer, "w") as pipe:
                json.dump(act(*arguments), pipe)
        finally:
            if sys.exc_info()[0]:
                traceback.print_exc()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def opened(paths: list[str]) -> list[str]:
    """Those of the paths that this process can list, read, write or connect to."""
    found = []
    for path in paths:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                os.close(os.open(path, flags))
                found.append(path)
            except OSError:
                continue
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
                found.append(path)
            except OSError:
                continue
    return sorted(set(found))


def statuses(port: int, requests: list[tuple[str, str, Any]], headers: dict[str, str]) -> dict[str, int | str]:
    """Status of each request (method, path, JSON body), or the name of its error."""
    answered: dict[str, int | str] = {}
    for method, path, body in requests:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            content = {"content-type": "application/json", **headers}
            connection.request(method, path, None if body is None else json.dumps(body), content)
            answered[f"{method} {path}"] = connection.getresponse().status
        except (OSError, HTTPException) as error:
            answered[f"{method} {path}"] = type(error).__name__
        finally:
            connection.close()
    return answered


def send_rubbish(ports: list[int]) -> int:
    """To each port, a few bytes that no protocol begins with and some that gloo would take for a sequence number."""
    reached = 0
    for port in ports:
        for content in (b"\x00" * 8, b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n"):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                    stranger.sendall(content)
                    reached += 1
            except OSError:
                continue
    return reached


def command_lines() -> str:
    """Command lines of all processes, as any user reads them, and those environments that this user may read."""
    texts = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                texts.append((process / name).read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(texts)
