"""What is wrong with a recipe: one value per problem, one exception that lists them all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that a recipe's author has to change, or should look at."""

    key: str
    """Dotted key of the recipe; empty where the whole file is meant."""
    message: str
    where: str = ""
    """`file:line`, `command line`, `default`, or a file alone."""
    warning: bool = False
    """True where the run may start all the same."""

    def __str__(self) -> str:
        message = f"warning: {self.message}" if self.warning else self.message
        return ": ".join(part for part in (self.where, self.key, message) if part)


Violation = tuple[str, str]
"""(dotted key, what is wrong with it): what a rule yields, which does not know where the key was set."""


class RecipeError(ValueError):
    """A recipe was refused; the text names every problem and where it stands."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__("\n".join([*map(str, self.problems), f"{len(self.problems)} {noun}. Nothing was started."]))


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the closest known name, else an empty string."""
    close = get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""
