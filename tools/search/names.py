"""Made-up names that resemble each other: people share first and last names, companies and towns parts of theirs."""

import math
import random
from collections.abc import Callable, Mapping
from itertools import product

Names = dict[str, list[str]]
"""Kind (person, company, town, school, book) -> different names"""

ONSETS = ("b", "br", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "w", "j", "kl")
VOWELS = ("a", "e", "i", "o", "u", "ai")
FIRST_ENDINGS = ("", "n", "s", "ra", "l")
LAST_ENDINGS = ("rd", "nsen", "ller", "gar", "tt", "ski", "vic", "nd")
TOWN_ENDINGS = ("by", "stad", "holm", "ham", "ton", "ford", "vik", "dorf", "mouth", "field", "wick", "burg")
TOWN_PREFIXES = ("Upper", "Lower", "New", "Old", "Port", "West", "East")
COMPANY_KINDS = ("Mills", "Works", "Bank", "Press", "Foods", "Shipping", "Mining", "Glass", "Timber", "Textiles",
                 "Motors", "Brewery", "Instruments", "Railways", "Chemicals", "Paper", "Steel")  # fmt: skip
SCHOOL_KINDS = ("Academy", "College", "Institute", "School of Arts", "Polytechnic", "Seminary", "Conservatory")
ADJECTIVES = ("Silent", "Golden", "Broken", "Distant", "Hidden", "Last", "Crooked", "Winter", "Painted", "Hollow",
              "Second", "Patient", "Burning", "Quiet", "Iron", "Borrowed")  # fmt: skip
NOUNS = ("Harbour", "Orchard", "Lantern", "Bridge", "Garden", "Clock", "River", "Mirror", "Tower", "Letter", "Island",
         "Winter", "Map", "Staircase", "Voyage", "Market")  # fmt: skip
LASTS_OF_A_FIRST = 2.4
"""Last names by first names; as many times more are the names that could be than the people."""
MAX_TRIES = 400
"""Draws in a row that give a name which is there already."""


def make_names(rng: random.Random, counts: Mapping[str, int]) -> Names:
    """
    Args:
        counts: of each kind.

    Raises:
        ValueError: there are not so many names.
    """
    stems = ["".join(parts) for parts in product(ONSETS, VOWELS, ONSETS, VOWELS)]
    rng.shuffle(stems)
    num_first = math.isqrt(counts["person"]) + 1
    num_last = int(LASTS_OF_A_FIRST * num_first)
    num_towns = max(10, counts["town"] // 6)
    firsts = [(stems.pop() + rng.choice(FIRST_ENDINGS)).capitalize() for _ in range(num_first)]
    lasts = [(stems.pop() + rng.choice(LAST_ENDINGS)).capitalize() for _ in range(num_last)]
    heads = [stems.pop().capitalize() for _ in range(min(num_towns, len(stems)))]

    def town() -> str:
        name = rng.choice(heads) + rng.choice(TOWN_ENDINGS)
        return f"{rng.choice(TOWN_PREFIXES)} {name}" if rng.random() < 0.25 else name

    def company() -> str:
        owner = rng.choice(lasts) if rng.random() < 0.7 else f"{rng.choice(lasts)} and {rng.choice(lasts)}"
        return f"{owner} {rng.choice(COMPANY_KINDS)}"

    def book() -> str:
        return f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} of {rng.choice(towns)}"

    towns = _drawn(counts["town"], town)
    return {
        "person": _drawn(counts["person"], lambda: f"{rng.choice(firsts)} {rng.choice(lasts)}"),
        "company": _drawn(counts["company"], company),
        "town": towns,
        "school": _drawn(counts["school"], lambda: f"{rng.choice(towns)} {rng.choice(SCHOOL_KINDS)}"),
        "book": _drawn(counts["book"], book),
    }


def _drawn(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    tries = 0
    while len(found) < count:
        before = len(found)
        found[make()] = None
        tries = 0 if len(found) > before else tries + 1
        if tries > MAX_TRIES:
            raise ValueError(f"there are no {count} different names; use fewer passages")
    return list(found)
