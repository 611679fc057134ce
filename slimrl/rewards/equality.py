"""Whether an answer is the label: decided here where both are of a kind that is known exactly (kinds.py).

- Numbers are equal exactly; `0.33` is no third.
- A unit that only one of them has does not count, two different ones do. `10%` is 10 and 0.1; `45°` is 45 and pi/4.
- Digits in a base and words are the same or not. Of choices the letter is, and the text behind it if both have one.
- Tuples, intervals and ratios have the same brackets and equal items in order. Sets, unions and lists that are not
  of words have equal items in any order.
- `x = 4` is 4, and is not `y = 4`.
- Expressions, inequalities and other equations are asked about.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeGuard

from slimrl.rewards.kinds import Answer, Choice, Group, Named, Quantity, Relation, Words, read
from slimrl.rewards.latex import plain, squeezed
from slimrl.rewards.units import DEGREE, PERCENT

_SET_OR_MATRIX = re.compile(r"\\(?:mathbb|setminus|begin)(?![A-Za-z])")
Ask = Callable[[str, str], bool]
"""Whether two expressions are equal: answer and label in LaTeX."""


def is_label(answer: str, label: str, ask: Ask) -> bool:
    """Whether an answer, as within \\boxed{}, is the label."""
    given, wanted = plain(answer), plain(label)
    return squeezed(given) == squeezed(wanted) or same(read(given), read(wanted), ask)


def same(answer: Answer, label: Answer, ask: Ask) -> bool:
    """Whether what two answers say is the same."""
    if isinstance(answer, Named) and isinstance(label, Named):
        values = [(one, other) for one in answer.values for other in label.values]
        return answer.name == label.name and all(same(one, other, ask) for one, other in values)
    if isinstance(answer, Named | Relation) and isinstance(label, Named | Relation):
        return ask(answer.text, label.text)
    if isinstance(answer, Named):
        return all(same(value, label, ask) for value in answer.values)
    if isinstance(label, Named):
        return all(same(answer, value, ask) for value in label.values)
    if isinstance(answer, Choice) and isinstance(label, Choice):
        return same_choice(answer, label)
    if isinstance(answer, Quantity) and isinstance(label, Quantity):
        return _same_quantities(answer, label, ask)
    if isinstance(answer, Group) and isinstance(label, Group):
        return _same_groups(answer, label, ask)
    if _may_be_set(answer) and _may_be_set(label):
        # Such as x > 2 or all reals, and an interval.
        return ask(answer.text, label.text)
    return answer == label


def _may_be_set(one: Answer) -> TypeGuard[Group | Relation | Quantity]:
    """Whether an answer may be a set or a matrix. A single expression is none: math-verify would take a set of one item
    for the item."""
    if isinstance(one, Quantity):
        return one.value is None and not one.unit and bool(_SET_OR_MATRIX.search(one.text))
    return isinstance(one, Group | Relation)


def same_choice(answer: Choice, label: Choice) -> bool:
    """Whether the letters are the same, and what both say behind them. A letter is no name with that initial, such as
    the label `J. Smith`."""
    if answer.said and label.said:
        return (answer.letter, answer.said) == (label.letter, label.said)
    return answer.letter == label.letter and (label.in_brackets or not label.said)


def _same_quantities(answer: Quantity, label: Quantity, ask: Ask) -> bool:
    units = {answer.unit, label.unit} - {""}
    if len(units) > 1:
        return False
    if answer.value is not None and label.value is not None:
        both = _values(answer.value, answer.unit, label.unit) & _values(label.value, label.unit, answer.unit)
        return bool(both)
    if squeezed(answer.text) == squeezed(label.text) or (units and _written_out(answer) == _written_out(label)):
        return True
    if answer.unit != label.unit and DEGREE in units and (r"\pi" in answer.text or r"\pi" in label.text):
        # An angle without a unit is in radians.
        return ask(*(rf"({one.text})\cdot\pi/180" if one.unit == DEGREE else one.text for one in (answer, label)))
    return ask(answer.text, label.text)


def _written_out(one: Quantity) -> str:
    r"""A quantity's text with the unit as letters, since `5\text{ m}` is also written `5 m`, which could be a
    product."""
    return (one.text + one.unit).replace(" ", "")


def _values(value: Fraction, unit: str, other_unit: str) -> set[Fraction]:
    """Values that a number may stand for, compared with another: a percentage, compared with a plain number, also for
    its hundredth."""
    return {value, value / 100} if unit == PERCENT != other_unit else {value}


def _same_groups(answer: Group, label: Group, ask: Ask) -> bool:
    brackets = [("{}" if one.brackets == "" else one.brackets) for one in (answer, label)]
    if brackets[0] != brackets[1] or len(answer.items) != len(label.items):
        return False
    if brackets[0] not in ("{}", "U") or all(isinstance(item, Words) for item in label.items):
        return all(same(one, other, ask) for one, other in zip(answer.items, label.items, strict=True))
    left = list(answer.items)
    for wanted in label.items:
        found = next((item for item in left if same(item, wanted, ask)), None)
        if found is None:
            return False
        left.remove(found)
    return True
