"""Problems of a recipe, the exception that lists them, and suggestions for their messages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slimrl.base.visible import short_words


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that the recipe's author has to change, or should look at."""

    key: str
    """Dotted key of the recipe; empty for the whole file."""
    message: str
    where: str = ""
    """`file:line`, `command line`, `default`, or a file alone."""
    warning: bool = False
    """Whether it is only a warning: the run may start nevertheless."""
    count: int = 1
    """Things of the same kind that its message lists, such as broken lines"""

    def __str__(self) -> str:
        message = f"warning: {self.message}" if self.warning else self.message
        text = ": ".join(part for part in (self.where, self.key, message) if part)
        return short_words(text)


Violation = tuple[str, str]
"""(dotted key, message), from a rule, which does not know where the key was set."""


class RecipeError(ValueError):
    """A recipe was refused; the text lists every problem with its file and line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = sum(problem.count for problem in self.problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__("\n".join([*map(str, self.problems), f"{count} {noun}. Nothing was started."]))


def syntax_text(error: SyntaxError) -> str:
    """Where and why a module has a syntax error: `file:line: message`."""
    place = f"{error.filename}:{error.lineno}" if error.lineno else error.filename
    return f"{place}: {error.msg}"


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the closest known name, else an empty string."""
    close = closest(wrong, known)
    return "" if close is None else f" Did you mean {close}?"


def closest(wrong: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The closest known name whose similarity (0 to 1) is at least `cutoff`."""
    # Only mistakes need it, and a recipe is checked in milliseconds.
    from difflib import get_close_matches

    known = list(known)
    if same := [name for name in known if name.lower() == wrong.lower()]:
        return same[0]
    return next(iter(get_close_matches(wrong, known, n=1, cutoff=cutoff)), None)


def near_name(wrong: str, known: Iterable[str]) -> str | None:
    """A known name that differs by a slip of the keyboard, or by words left out; None if there is none."""
    known = list(known)
    cutoff = 0.7 if len(wrong) <= 5 else 0.8
    if (close := closest(wrong, known, cutoff=cutoff)) is not None:
        return close
    words = _words(wrong)
    longer = [name for name in known if _words(name)[: len(words)] == words]
    if len(longer) == 1:
        return longer[0]
    of_words = [name for name in known if len(words) > 1 and set(words) <= set(_words(name))]
    return closest(wrong, of_words, cutoff=0.0)


def _words(name: str) -> list[str]:
    """The words of a key, each as its singular."""
    return [word.rstrip("s") for word in name.split("_")]


def fitting_text(wrong: int, fits: Callable[[int], bool], largest: int) -> str:
    """` Use A or B.`: the nearest sizes below and above `wrong` that `fits` accepts, up to `largest`; empty if none."""
    below = next((size for size in range(min(wrong - 1, largest), 0, -1) if fits(size)), None)
    above = next((size for size in range(wrong + 1, largest + 1) if fits(size)), None)
    sizes = [str(size) for size in (below, above) if size is not None]
    return f" Use {' or '.join(sizes)}." if sizes else ""


def multiples_text(size: int, wrong: int) -> str:
    """` Use A or B.`: the multiples of `size` next to `wrong`, from `size` on."""
    below = wrong // size * size
    return f" Use {' or '.join(str(number) for number in (below, below + size) if number)}."
