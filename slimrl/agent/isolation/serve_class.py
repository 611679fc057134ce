"""Loads an environment's class in the process that will serve it, and checks it."""

import importlib
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.agent.environment_class import check_arguments, check_class, check_roles
from slimrl.agent.isolation.forking_server import BACKLOG, ForkingServer
from slimrl.agent.isolation.supervisor import children_of_this, supervised


def check(environment: str, arguments: Mapping[str, Any], roles: Sequence[str]) -> list[str]:
    """The roles that the class says it has.

    Raises:
        ValueError: there is no such class, a package that it needs is not here, it refuses the arguments, or has not
            all of these roles.
    """
    return list(check_roles(environment, _checked(environment, arguments), roles))


def serve(
    environment: str, arguments: Mapping[str, Any], socket_path: str, close_s: float, ready: Callable[[], None]
) -> None:
    """Check as `check` does, let the class start what its instances share (its class method `share`, if it has one),
    call `ready` when clients can connect, and serve until the standard input ends or a process that `share` started."""
    supervised(Path(socket_path))
    make = _checked(environment, arguments)
    before = children_of_this()
    if (share := getattr(make, "share", None)) is not None:
        share(**arguments)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(socket_path)
    listening.listen(BACKLOG)
    shared = set(children_of_this()).difference(before)
    ready()
    ForkingServer(listening, partial(make, **arguments), close_s, shared).run()


def _checked(path: str, arguments: Mapping[str, Any]) -> Any:
    module, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}: {error} (in {sys.prefix})") from error
    check_class(path, make, arguments, asynchronous=False)
    check_arguments(path, make, arguments)
    return make
