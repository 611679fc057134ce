"""The kinds of requests that generated tasks consist of: their texts, right calls, and easily made mistakes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FILES, TICKETS = "GorillaFileSystem", "TicketAPI"
FUNCTIONS = {
    FILES: ["mv", "cp", "rm", "mkdir", "cd"],
    TICKETS: ["create_ticket", "close_ticket", "resolve_ticket"],
}
"""The functions that the policy is shown, by class"""
USER = "ann"
"""Who is logged in to the tickets"""

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call; an argument `{a}` is the request's value of that name"""
Values = dict[str, Any]
"""Values that a request names: `a`, `b` files, `d` a folder, `n` and `p` number and priority of a ticket, `w` a text"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of request."""

    class_name: str
    texts: tuple[str, ...]
    right: tuple[Call, ...]
    mistakes: tuple[tuple[Call, ...], ...]
    """What some demonstrations do instead; nothing at all is one of them"""
    before: Callable[[Values], dict[str, Any]]
    """What there is before: contents of the folder, or a ticket"""

    @property
    def leaves_folder(self) -> bool:
        """Whether it ends in another folder, so that no request can follow."""
        return any(name == "cd" for name, _ in self.right)


def _nothing(values: Values) -> dict[str, Any]:
    return {}


def _file(values: Values) -> dict[str, Any]:
    return {values["a"]: {"type": "file", "content": "text"}}


def _folder(values: Values) -> dict[str, Any]:
    return {values["d"]: {"type": "directory", "contents": _file(values)}}


def _ticket(values: Values) -> dict[str, Any]:
    fields = {"title": "help", "description": "", "status": "Open", "priority": 1, "created_by": USER}
    return {"id": values["n"], **fields}


KINDS = (
    Kind(
        class_name=FILES,
        texts=("Rename {a} to {b}.", "Change the name of {a} to {b}."),
        right=(("mv", {"source": "{a}", "destination": "{b}"}),),
        mistakes=(
            (("cp", {"source": "{a}", "destination": "{b}"}),),
            (("mv", {"source": "{b}", "destination": "{a}"}),),
        ),
        before=_file,
    ),
    Kind(
        class_name=FILES,
        texts=("Copy {a} to {b}.", "Make a copy of {a} with the name {b}."),
        right=(("cp", {"source": "{a}", "destination": "{b}"}),),
        mistakes=((("mv", {"source": "{a}", "destination": "{b}"}),), ()),
        before=_file,
    ),
    Kind(
        class_name=FILES,
        texts=("Delete {a}.", "Remove {a}."),
        right=(("rm", {"file_name": "{a}"}),),
        mistakes=((), (("mkdir", {"dir_name": "{a}"}),)),
        before=_file,
    ),
    Kind(
        class_name=FILES,
        texts=("Make a folder {d}.", "Create the folder {d}."),
        right=(("mkdir", {"dir_name": "{d}"}),),
        mistakes=((("cd", {"folder": "{d}"}),), ()),
        before=_nothing,
    ),
    Kind(
        class_name=FILES,
        texts=("In the folder {d}, delete {a}.", "Remove {a} from the folder {d}."),
        right=(("cd", {"folder": "{d}"}), ("rm", {"file_name": "{a}"})),
        mistakes=((("rm", {"file_name": "{a}"}),), (("rm", {"file_name": "{d}"}),)),
        before=_folder,
    ),
    Kind(
        class_name=TICKETS,
        texts=("Open a ticket {w} with priority {p}.", "Create a ticket {w}, priority {p}."),
        right=(("create_ticket", {"title": "{w}", "priority": "{p}"}),),
        mistakes=((("create_ticket", {"title": "{w}"}),), ()),
        before=_nothing,
    ),
    Kind(
        class_name=TICKETS,
        texts=("Close ticket {n}.", "Please close the ticket {n}."),
        right=(("close_ticket", {"ticket_id": "{n}"}),),
        mistakes=((("resolve_ticket", {"ticket_id": "{n}", "resolution": "closed"}),), ()),
        before=_ticket,
    ),
    Kind(
        class_name=TICKETS,
        texts=("Resolve ticket {n} with {w}.", "The solution of ticket {n} is {w}."),
        right=(("resolve_ticket", {"ticket_id": "{n}", "resolution": "{w}"}),),
        mistakes=((("close_ticket", {"ticket_id": "{n}"}),), ()),
        before=_ticket,
    ),
)
