"""Random plans, from a file that says for each tool how its arguments are drawn and how its result is said.

A plan is drawn backward from its last step: a slot takes a value of its own, or the result of an earlier step whose
kind it wants.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from slimrl_tools.synthesis.forward.plan import ASKS, HERE, Plan, Step, texts

from slimrl.base.jsonl import read_jsonl
from slimrl.config.problems import suggestion

SLOT = re.compile(r"\{([A-Za-z_]\w*)\}")
WAYS = ("integer", "values", "of")


@dataclass(frozen=True, kw_only=True)
class Slot:
    integer: tuple[int, int] | None = None
    """The least and the largest"""
    values: tuple[str, ...] = ()
    of: str = ""
    """Kind of the results that it takes"""

    def value(self, rng: random.Random) -> str | None:
        """A value of its own; None if it takes results alone."""
        if self.integer is not None:
            return str(rng.randint(*self.integer))
        return rng.choice(self.values) if self.values else None


@dataclass(frozen=True, kw_only=True)
class Template:
    """A way to use a tool. In all texts `{name}` stands for a slot."""

    tool: str
    arguments: Mapping[str, Any]
    says: str
    slots: Mapping[str, Slot]
    gives: str = ""
    """Kind of its results"""
    asks: str = ASKS
    result: str = ""

    @property
    def takers(self) -> list[str]:
        """Slots that can take a result."""
        return [name for name, slot in self.slots.items() if slot.of]

    @property
    def needing(self) -> list[str]:
        """Slots that take results alone."""
        return [name for name, slot in self.slots.items() if slot.of and not (slot.values or slot.integer)]


class RandomPlans:
    """
    Args:
        rng: where all of them come from.
    """

    max_tries = 2000
    """Draws in a row of which none becomes a task"""

    def __init__(self, templates: Sequence[Template], rng: random.Random) -> None:
        self._templates, self._rng = templates, rng

    def draw(self, num_steps: int) -> Plan | None:
        """A plan of so many steps; None if what was drawn did not fit together."""
        steps: list[Step] = []
        last = self._drawn(self._templates, num_steps, steps)
        return last and Plan(steps=tuple(steps), asks=last.asks)

    def _drawn(self, templates: Sequence[Template], num_steps: int, steps: list[Step]) -> Template | None:
        """Append so many steps, the last of which is of the template that is returned."""
        template = self._rng.choice(templates)
        shares = self._shares(template, num_steps - 1)
        if shares is None:
            return None
        values: dict[str, str] = {}
        for name, slot in template.slots.items():
            if name in shares:
                if self._drawn([one for one in self._templates if one.gives == slot.of], shares[name], steps) is None:
                    return None
                values[name] = f"{{#{len(steps)}}}"
            else:
                value = slot.value(self._rng)
                assert value is not None
                values[name] = value
        steps.append(_step(template, values))
        return template

    def _shares(self, template: Template, num_steps: int) -> dict[str, int] | None:
        """How many steps lead to which slot; None if the template has not the slots for so many."""
        needing, rng = template.needing, self._rng
        least, most = max(len(needing), min(num_steps, 1)), min(num_steps, len(template.takers))
        if least > most:
            return None
        optional = [name for name in template.takers if name not in needing]
        taking = needing + rng.sample(optional, rng.randint(least, most) - len(needing))
        rng.shuffle(taking)
        ends = [0, *sorted(rng.sample(range(1, num_steps), len(taking) - 1)), num_steps] if taking else [0]
        return {name: ends[place + 1] - ends[place] for place, name in enumerate(taking)}


def _step(template: Template, values: Mapping[str, str]) -> Step:
    def put(text: str) -> str:
        return SLOT.sub(lambda found: values.get(found[1], found[0]), text)

    def everywhere(value: Any) -> Any:
        match value:
            case str():
                return put(value)
            case list():
                return [everywhere(one) for one in value]
            case Mapping():
                return {key: everywhere(one) for key, one in value.items()}
            case _:
                return value

    return Step(
        tool=template.tool,
        arguments=everywhere(template.arguments),
        says=put(template.says),
        result=put(template.result),
        inputs=tuple(values.values()),
    )


def read_templates(file: Path, parameters: Mapping[str, Mapping[str, Any]]) -> list[Template]:
    """
    Args:
        file: JSONL; docs/synthesis.md says what stands in a line.
        parameters: tool -> the JSON schema of its arguments.

    Raises:
        ValueError: a line is no template, or does not fit its tool; names the lines.
    """
    found = read_jsonl(file, partial(_template, parameters))
    given = {one.gives for one in found if one.gives}
    for template in found:
        for name in template.takers:
            if (kind := template.slots[name].of) not in given:
                raise ValueError(f'{file}: the slot {name} takes results of kind {kind!r}, which no line "gives"')
    return found


def _template(parameters: Mapping[str, Mapping[str, Any]], line: dict[str, Any], number: int) -> Template:
    known = {field.name for field in fields(Template)}
    if unknown := line.keys() - known:
        raise ValueError(f"has the unknown key {min(unknown)!r}; keys are {', '.join(sorted(known))}")
    if missing := {"tool", "arguments", "says"} - line.keys():
        raise ValueError(f'"{min(missing)}" is missing')
    if wrong := [key for key in ("tool", "says", "gives", "asks", "result") if not isinstance(line.get(key, ""), str)]:
        raise ValueError(f'"{wrong[0]}" is not a text')
    if line["tool"] not in parameters:
        raise ValueError(f'"tool" is {line["tool"]!r}.{suggestion(line["tool"], parameters)}')
    schema, arguments = parameters[line["tool"]], line["arguments"]
    if not isinstance(arguments, dict) or arguments.keys() - schema.get("properties", {}).keys():
        raise ValueError(f'"arguments" is no object of {", ".join(schema.get("properties", {})) or "nothing"}')
    if lacking := set(schema.get("required", ())) - arguments.keys():
        raise ValueError(f'"arguments" has no {min(lacking)!r}, which {line["tool"]} needs')
    if wrong := [key for key in ("asks", "result") if line.get(key) and line[key].count(HERE) != 1]:
        raise ValueError(f'"{wrong[0]}" has {HERE} once, where the result stands')
    given = line.get("slots", {})
    if not isinstance(given, dict):
        raise ValueError('"slots" is no object')
    slots = {name: _slot(name, value) for name, value in given.items()}
    used = set(SLOT.findall(" ".join(texts(arguments))))
    if (said := set(SLOT.findall(line["says"]))) != used or used != slots.keys():
        differs = min((said ^ used) | (used ^ slots.keys()))
        raise ValueError(f'{{{differs}}} must be in "arguments", in "says" and in "slots"')
    return Template(**{**line, "slots": slots})


def _slot(name: str, value: Any) -> Slot:
    if not isinstance(value, dict) or not value or value.keys() - set(WAYS) or {"integer", "values"} <= value.keys():
        raise ValueError(f'the slot {name} is no object of "integer" or "values", or "of", or both')
    match value.get("integer"):
        case None:
            integer = None
        case [int(low), int(high)] if low <= high:
            integer = (low, high)
        case _:
            raise ValueError(f'"integer" of the slot {name} is no list of the least and the largest')
    values, kind = value.get("values", []), value.get("of", "")
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise ValueError(f'"values" of the slot {name} is no list of texts')
    if not isinstance(kind, str) or ("of" in value and not kind) or ("values" in value and not values):
        raise ValueError(f"the slot {name} has nothing to take")
    return Slot(integer=integer, values=tuple(values), of=kind)
