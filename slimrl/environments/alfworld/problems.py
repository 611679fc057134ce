"""Draws problems of ALFWorld's domain (arXiv:2010.03768): a room, what lies in it, and one of six kinds of goals.

A problem is text in PDDL. Its goal does not hold at the start: nothing of the goal's type lies in a receptacle of the
goal's type. That it can be solved is not sure before a planner has solved it.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimrl.environments.alfworld import wheel
from slimrl.environments.alfworld.rooms import BATHROOM, BEDROOM, KITCHEN, LAMP, LAMP_PLACES, LIVING_ROOM, Room


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of goals."""

    rooms: Sequence[Room]
    change: str = ""
    """What the object must undergo: a key of `wheel.changes()`"""
    tool: str = ""
    """Type of the receptacle in which it does, where the object is never to be put"""
    copies: int = 1
    """Objects that the goal asks for"""
    lamp: bool = False
    """Whether the goal is to hold the object where a lamp is on, rather than to put it somewhere"""


KINDS = {
    "pick_and_place_simple": Kind(rooms=(KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM)),
    "look_at_obj_in_light": Kind(rooms=(LIVING_ROOM, BEDROOM), lamp=True),
    "pick_clean_then_place_in_recep": Kind(rooms=(KITCHEN, BATHROOM), change="Cleanable", tool="SinkBasin"),
    "pick_heat_then_place_in_recep": Kind(rooms=(KITCHEN,), change="Heatable", tool="Microwave"),
    "pick_cool_then_place_in_recep": Kind(rooms=(KITCHEN,), change="Coolable", tool="Fridge"),
    "pick_two_obj_and_place": Kind(rooms=(KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM), copies=2),
}
"""By the names that ALFWorld gives them"""
MIN_RECEPTACLES = 5
"""So that every room has its fixed ones and one more"""
PROPERTIES = {"Heatable": "heatable", "Coolable": "coolable", "Cleanable": "cleanable"}
"""Key of `wheel.changes()` -> predicate of the domain"""


@dataclass(frozen=True, kw_only=True)
class Problem:
    kind: str
    task: str
    """The goal in ALFWorld's words, without a full stop"""
    pddl: str


@dataclass(frozen=True, kw_only=True)
class Thing:
    type: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.type}_{self.number}"


def draw_problem(kind_name: str, rng: random.Random, *, receptacles: int, objects: int) -> Problem:
    """
    Args:
        receptacles: how many there are in the room, MIN_RECEPTACLES at least.
        objects: how many there are beside those of the goal.
    """
    kind = KINDS[kind_name]
    room = rng.choice(kind.rooms)
    types = [*room.fixed, *rng.sample(room.further, min(receptacles - len(room.fixed), len(room.further)))]
    places = _numbered(types)
    wanted, target = _goal_types(kind, room, types, rng)
    others = [name for name in room.objects if name != wanted and _holders(name, places)]
    things = _numbered([*[wanted] * kind.copies, *rng.choices(others, k=objects)])
    inside = {
        thing: rng.choice(
            [place for place in _holders(thing.type, places) if (thing.type, place.type) != (wanted, target)]
        )
        for thing in things
    }
    if kind.lamp:
        lamp = Thing(type=LAMP, number=1)
        inside[lamp] = rng.choice([place for place in places if place.type in LAMP_PLACES])
    goal = wheel.goals()[kind_name]
    names = {"obj": wanted, "recep": target, "toggle": LAMP}
    task = rng.choice(list(goal["templates"])).format(**{key: name.lower() for key, name in names.items()})
    pddl = _pddl(places, inside, str(goal["pddl"]).format(**names).replace("#", "-"))
    return Problem(kind=kind_name, task=task, pddl=pddl)


def _numbered(types: Iterable[str]) -> list[Thing]:
    counts: Counter[str] = Counter()
    things = []
    for name in types:
        counts[name] += 1
        things.append(Thing(type=name, number=counts[name]))
    return things


def _can_hold(place_type: str) -> set[str]:
    return wheel.contents()[place_type]


def _holders(object_type: str, places: Iterable[Thing]) -> list[Thing]:
    return [place for place in places if object_type in _can_hold(place.type)]


def _goal_types(kind: Kind, room: Room, types: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """Types of the goal's object and receptacle; the object has another place to lie at first."""
    choices = [
        (name, target)
        for name in room.objects
        if not kind.change or name in wheel.changes()[kind.change]
        for target in dict.fromkeys(types)
        if name in _can_hold(target)
        and target != kind.tool
        and any(name in _can_hold(other) for other in types if other != target)
    ]
    return rng.choice(choices)


def _pddl(places: Sequence[Thing], inside: dict[Thing, Thing], goal: str) -> str:
    """
    Args:
        inside: object -> receptacle.
        goal: with the parenthesis that closes the definition, as the wheel's goals have it.
    """
    location = {place: f"loc_{number}" for number, place in enumerate(places, 1)}
    place_types = sorted({place.type for place in places})
    types = sorted({thing.type for thing in inside})
    objects = [
        "agent1 - agent",
        "loc_0 " + " ".join(location.values()) + " - location",
        *(f"{name}Type - rtype" for name in sorted({*place_types, "SinkBasin", "Microwave", "Fridge"})),
        *(f"{name}Type - otype" for name in sorted({*types, "Knife", "ButterKnife"})),
        *(f"{place.name} - receptacle" for place in places),
        *(f"{thing.name} - object" for thing in inside),
    ]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_0)"]
    for place in places:
        facts += [
            f"(receptacleAtLocation {place.name} {location[place]})",
            f"(receptacleType {place.name} {place.type}Type)",
        ]
        if place.type in wheel.openable():
            facts.append(f"(openable {place.name})")
    for place_type in place_types:
        facts += [f"(canContain {place_type}Type {name}Type)" for name in types if name in _can_hold(place_type)]
    for thing, place in inside.items():
        facts += [
            f"(objectType {thing.name} {thing.type}Type)",
            f"(inReceptacle {thing.name} {place.name})",
            f"(wasInReceptacle {thing.name} {place.name})",
            f"(objectAtLocation {thing.name} {location[place]})",
        ]
        facts += [f"({word} {thing.name})" for key, word in PROPERTIES.items() if thing.type in wheel.changes()[key]]
        facts.append(f"({'toggleable' if thing.type == LAMP else 'pickupable'} {thing.name})")
    lines = "\n  ".join(objects), "\n  ".join(facts)
    return f"(define (problem drawn) (:domain alfred)\n (:objects\n  {lines[0]})\n (:init\n  {lines[1]})\n{goal}"
