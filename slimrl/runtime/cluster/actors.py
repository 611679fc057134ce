"""Ray actors by name, whose methods are called on several of them at once.

A call names the method itself, as in `group.begin(TrainerActor.resync, 3)`: types are checked against its signature,
and the reference goes to the actor as it is.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate

import ray

from slimrl.base.spans import SPANS
from slimrl.runtime.cluster.calls import Calls, Member
from slimrl.runtime.cluster.placement import Node


def run[A, **P, T](actor: A, method: Callable[Concatenate[A, P], T], *given: P.args, **options: P.kwargs) -> T:
    """Call a method of the actor whose process this is, and record that as a span."""
    with SPANS(method.__name__):
        return method(actor, *given, **options)


class ActorGroup[A]:
    """Actors of class A, by the name that errors use."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    @property
    def names(self) -> list[str]:
        return list(self._members)

    @property
    def handles(self) -> dict[str, Any]:
        """Ray's handles, by name."""
        return {name: member.actor for name, member in self._members.items()}

    def add(self, name: str, actor: Any, log: Path, node: Node) -> None:
        """Add an actor, or put it in the place of one that has ended."""
        self._members[name] = Member(actor=actor, log=log, node=node)

    def remove(self, name: str) -> None:
        """Kill an actor, whatever its state, and forget it."""
        ray.kill(self._members.pop(name).actor)

    def on(self, names: Iterable[str]) -> "ActorGroup[A]":
        """These actors of the group, as they are now."""
        chosen = ActorGroup[A]()
        chosen._members = {name: self._members[name] for name in names}
        return chosen

    def begin[**P, T](self, method: Callable[Concatenate[A, P], T], *given: P.args, **options: P.kwargs) -> Calls[T]:
        """Call a method of all actors."""
        # `__ray_call__` is what Ray gives every actor to run a function on it.
        refs = {
            name: member.actor.__ray_call__.remote(run, method, *given, **options)
            for name, member in self._members.items()
        }
        return Calls(method.__name__, refs, dict(self._members))

    def kill(self) -> None:
        """Kill all actors at once; child processes that watch them end too."""
        for member in self._members.values():
            ray.kill(member.actor)
