"""Conversations for the cold start of a toy: pages made up in the form of click-button and click-test-2, in the view
`set_of_marks`, and clicks of mixed quality.

A demonstration clicks the right button, or the first one, or any element, with the probabilities of BEHAVIOURS. A model
that imitates them knows the form of an action, and is right about half of the time. Standard library alone.
"""

import random
from collections.abc import Iterator
from typing import Any

from slimrl.environments.miniwob.page_reader import GOAL

BUTTONS = ("submit", "okay", "ok", "yes", "no", "cancel", "next", "previous")
"""Names that click-button draws from, also with a capital"""
BEHAVIOURS = {"right": 0.15, "first": 0.25, "any": 0.6}
MAX_ELEMENTS = 6


def conversations(count: int, instructions: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """So many conversations of one turn.

    Args:
        instructions: what stands before the goal.
    """
    for _ in range(count):
        name, elements = rng.choice((_click_button, _click_button, _click_button, _click_test))(rng)
        right = [number for number, role, said in elements if said == name]
        clicked = {
            "right": right[0],
            "first": next(number for number, role, _ in elements if role == "button"),
            "any": rng.choice(elements)[0],
        }[rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]]
        goal = f'Click on the "{name}" button.' if name != "ONE" else "Click button ONE."
        page = "\n".join(f'[{number}] {role} "{said}"' for number, role, said in elements)
        yield {
            "messages": [
                {"role": "user", "content": f"{instructions}\n\n{GOAL}{goal}\n{page}"},
                {"role": "assistant", "content": f"click({clicked})"},
            ]
        }


Elements = list[tuple[int, str, str]]
"""Number, role and name of each"""


def _click_button(rng: random.Random) -> tuple[str, Elements]:
    elements, number, last = [], rng.randint(12, 18), rng.randrange(1, MAX_ELEMENTS)
    for place in range(last + 1):
        number += rng.randint(1, 3)
        if place < last and rng.random() < 0.4:
            elements.append((number, "textbox", ""))
        else:
            name = rng.choice(BUTTONS)
            elements.append((number, "button", rng.choice((name, name.capitalize()))))
    return rng.choice([name for _, role, name in elements if role == "button"]), elements


def _click_test(rng: random.Random) -> tuple[str, Elements]:
    number = rng.randint(11, 16)
    return "ONE", [(number, "button", "ONE"), (number + 1, "button", "TWO")]
