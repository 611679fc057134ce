"""Texts that may be moves: those that a game lists, or else all that its rules have.

Needs the standard library alone.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import product

LISTING = re.compile(
    r"(?:available (?:moves|actions(?: are)?)|valid moves|possible actions|remaining (?:hand|money cards)):(.*)", re.I
)
"""The line in which some games list the moves of the player whose turn it is"""
BRACKETED = re.compile(r"\[[^\[\]]+\]")
AMOUNT = "X"
"""Stands for any number in the moves that IndianPoker lists"""
AMOUNTS = (1, 2, 5)
GOODS = ("Wheat", "Wood", "Sheep", "Brick", "Ore")


def _breakthrough() -> list[str]:
    """One step forward, straight or diagonally, of either side on boards of up to ten files."""
    steps = [(file, rank, file + across, rank + ahead) for file, rank in product(range(10), range(1, 11))
             for across, ahead in product((-1, 0, 1), (1, -1))]  # fmt: skip
    return [f"[{chr(97 + a)}{b}{chr(97 + c)}{d}]" for a, b, c, d in steps if 0 <= c < 10 and 1 <= d <= 10]


def _checkers() -> list[str]:
    """Diagonal steps of one and jumps of two."""
    steps = [(row, column, row + down, column + across) for row, column in product(range(8), range(8))
             for down, across in product((-1, 1, -2, 2), (-1, 1, -2, 2)) if abs(down) == abs(across)]  # fmt: skip
    return [f"[{a} {b} {c} {d}]" for a, b, c, d in steps if 0 <= c < 8 and 0 <= d < 8 and (a + b) % 2]


def _alquerque() -> list[str]:
    """Steps of one and jumps of two in any direction."""
    ways = [(down, across) for down, across in product((-1, 0, 1), repeat=2) if down or across]
    steps = [(file, rank, file + size * across, rank + size * up) for file, rank in product(range(5), range(1, 6))
             for size in (1, 2) for up, across in ways]  # fmt: skip
    return [f"[{chr(97 + a)}{b} {chr(97 + c)}{d}]" for a, b, c, d in steps if 0 <= c < 5 and 1 <= d <= 5]


def _allocations() -> list[str]:
    """All of three fields and 20 units, and some of the larger games' five and seven fields."""
    found = [f"[A{a} B{b} C{20 - a - b}]" for a, b in product(range(21), repeat=2) if a + b <= 20]
    chance = random.Random(0)
    for names, units in (("ABCDE", 50), ("ABCDEFG", 75)):
        for _ in range(50):
            cuts = [0, *sorted(chance.randrange(units + 1) for _ in names[1:]), units]
            parts = (f"{name}{right - left}" for name, left, right in zip(names, cuts, cuts[1:], strict=False))
            found.append(f"[{' '.join(parts)}]")
    return found


CANDIDATES: Mapping[str, Sequence[str]] = {
    "Alquerque": _alquerque(),
    "Briscola": ["[play 1]", "[play 2]", "[play 3]"],
    "Breakthrough": _breakthrough(),
    "Checkers": _checkers(),
    "Chopsticks": [f"[attack {own} {other}]" for own, other in product(range(2), repeat=2)]
    + [f"[split {left} {right}]" for left, right in product(range(9), repeat=2)],
    "ColonelBlotto": _allocations(),
    "ConnectFour": [f"[col {column}]" for column in range(15)],
    "IteratedMatchingPennies": ["[heads]", "[tails]"],
    "IteratedPrisonersDilemma": ["[cooperate]", "[defect]"],
    "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
    "IteratedTwoThirdsAverage": [f"[{number}]" for number in range(101)],
    "LiarsDice": ["[call]", *(f"[bid: {count}, {face}]" for count, face in product(range(1, 11), range(1, 7)))],
    "Nim": [f"[{pile} {count}]" for pile, count in product(range(5), range(1, 12))],
    "Othello": [f"[{row}, {column}]" for row, column in product(range(14), repeat=2)],
    "SimpleNegotiation": [
        "[accept]",
        "[deny]",
        *(f"[offer: 3 {given} -> 2 {wanted}]" for given, wanted in zip(GOODS, GOODS[1:] + GOODS[:1], strict=True)),
    ],
}
"""Moves of games that do not always list them after each turn, by the game's name without its version"""


def candidates(game: str, heard: str) -> list[str]:
    """What a player may try, of which TextArena may refuse some.

    Args:
        game: TextArena's id, such as Nim-v0.
        heard: all that the player was told.
    """
    if (known := CANDIDATES.get(game.partition("-v")[0])) is not None:
        # Not what looks like a list, which the other player may have written.
        return list(known)
    listed = BRACKETED.findall(lines[-1]) if (lines := LISTING.findall(heard)) else []
    return [
        text.replace(AMOUNT, str(amount)) for text in listed for amount in (AMOUNTS if f" {AMOUNT}]" in text else (0,))
    ]
