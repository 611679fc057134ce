"""Easy tasks for small models: requests in one sentence, of which every value of the calls can be copied.

The ground truth of each task is run by the package's own classes: every call must succeed, and every request must
change what the classes hold.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.environments.bfcl.calls import Instances, is_error
from slimrl.environments.bfcl.entry import Entry
from slimrl.environments.bfcl.kinds import FILES, FUNCTIONS, KINDS, USER, Call, Kind, Values
from slimrl.environments.bfcl.python_calls import call_text
from slimrl.environments.bfcl.state import state_id

WORDS = ("plan", "note", "list", "book", "song", "menu", "idea", "mail", "bill", "form")
MAX_REPEATS = 1000
"""Tasks in a row that are there already, after which there are no more"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a user."""

    kind: Kind
    text: str
    values: Values

    def calls(self, template: Sequence[Call]) -> list[Call]:
        """The calls of one of the kind's templates."""
        return [(name, {key: self._filled(value) for key, value in arguments.items()}) for name, arguments in template]

    def right_calls(self) -> list[Call]:
        return self.calls(self.kind.right)

    def _filled(self, value: str) -> Any:
        """A value of a template; a number stays one."""
        return self.values[value[1:-1]] if value.startswith("{") else value


@dataclass(frozen=True, kw_only=True)
class Task:
    """Requests of one class, and the entry that they make."""

    requests: list[Request]
    entry: Entry


def generate(num: int, *, seed: int, turns: int, classes: Sequence[str] | None = None) -> list[Task]:
    """Tasks of one to `turns` requests, no two of which ask for the same.

    Raises:
        ValueError: no task has these classes, `turns` is below 1, or there are not so many tasks.
    """
    known = [name for name in FUNCTIONS if classes is None or name in classes]
    if not known or turns < 1:
        raise ValueError(
            f"no generated task has classes {classes} and {turns} turns. Use {' or '.join(FUNCTIONS)}, and at least 1."
        )
    rng, found, repeats = random.Random(seed), dict[str, Task](), 0
    while len(found) < num:
        class_name, num_requests = rng.choice(known), rng.randint(1, turns)
        requests = _requests(rng, class_name, num_requests)
        # Texts may say the same in other words, calls do not.
        key = repr([request.right_calls() for request in requests])
        repeats = repeats + 1 if key in found else 0
        if repeats > MAX_REPEATS:
            raise ValueError(f"only {len(found)} tasks of {num} can be generated. Ask for fewer, or allow more turns.")
        if key not in found:
            found[key] = Task(requests=requests, entry=_entry(requests, len(found)))
    return list(found.values())


def _requests(rng: random.Random, class_name: str, num: int) -> list[Request]:
    """Requests that have no value in common."""
    kinds = [kind for kind in KINDS if kind.class_name == class_name]
    staying = [kind for kind in kinds if not kind.leaves_folder]
    suffixes = rng.sample(range(100, 1000), 4 * num)
    made = []
    for number in range(num):
        names = [f"{rng.choice(WORDS)}{suffix}" for suffix in suffixes[4 * number : 4 * number + 4]]
        # Ticket numbers and names have their numbers at other places, so they differ too.
        values: Values = dict(zip("abdw", names, strict=True))
        values |= {"n": 10 * suffixes[4 * number] + rng.randrange(10), "p": rng.randint(2, 5)}
        kind = rng.choice(kinds if number == num - 1 else staying)
        made.append(Request(kind=kind, text=rng.choice(kind.texts).format(**values), values=values))
    return made


def _entry(requests: Sequence[Request], number: int) -> Entry:
    class_name = requests[0].kind.class_name
    befores = [before for request in requests if (before := request.kind.before(request.values))]
    entry = Entry(
        id=f"generated_{number}",
        involved_classes=[class_name],
        initial_config={class_name: _files(befores) if class_name == FILES else _tickets(befores)},
        questions=[[{"role": "user", "content": request.text}] for request in requests],
        ground_truth=[[str(call_text(*call)) for call in request.right_calls()] for request in requests],
        functions=FUNCTIONS[class_name],
    )
    _verify(entry, requests)
    return entry


def _files(befores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    contents = {name: item for before in befores for name, item in before.items()}
    return {"root": {"home": {"type": "directory", "contents": contents}}}


def _tickets(befores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"ticket_queue": list(befores), "ticket_counter": 1, "current_user": USER}


def _verify(entry: Entry, requests: Sequence[Request]) -> None:
    instances = Instances(entry, FUNCTIONS[entry.involved_classes[0]])
    for request in requests:
        before = state_id(instances.by_class, 0)
        results = [instances.call(*call)[0] for call in request.right_calls()]
        assert not any(map(is_error, results)), (request, results)
        assert state_id(instances.by_class, 0) != before, request
