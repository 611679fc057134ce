"""The order in which training goes through several files with weights.

1. Before each draw every file is credited with its share of one item.
2. The file with the most credit gives its next item, in an order of its own, and pays one.

After any number of items each file has given its share of them, up to about one item. Which file is next
depends on the weights alone, and a file's order on the seed and its name. A small file begins its next epoch earlier.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimrl.base.seeds import derive_seed
from slimrl.data.prompts import Sampler


class Mixture[T]:
    """Iterates over the items of several files; its state is that of each file, so a resumed run continues exactly."""

    def __init__(
        self, files: Mapping[str, Sequence[T]], weights: Mapping[str, float], *, seed: int, shuffle: bool
    ) -> None:
        """
        Args:
            files: items by the file's name.
            weights: of the same names, greater than 0.
        """
        assert files.keys() == weights.keys()
        self.weigh(weights)
        self._credits = dict.fromkeys(files, 0.0)
        self._samplers = {
            name: Sampler(items, seed=derive_seed(seed, "file", name), shuffle=shuffle) for name, items in files.items()
        }

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Take the next items with these weights, of the same names; files of weight 0 give none."""
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}

    def leave_out(self, is_out: Callable[[T], bool]) -> None:
        """Skip such items from now on, whose places in the order of their file stay.

        Raises:
            ValueError: a file would have no item left.
        """
        for name, sampler in self._samplers.items():
            try:
                sampler.leave_out(is_out)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    def take(self, count: int) -> list[T]:
        """The next `count` items."""
        return [self._samplers[self._next_file()].take(1)[0] for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """State for `restore`: the position and the credit of each file."""
        return {
            "files": {
                name: {**sampler.state(), "credit": self._credits[name]} for name, sampler in self._samplers.items()
            }
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Weights may have changed since.

        Raises:
            ValueError: the state is for other files, or for another number of items in one of them.
        """
        saved = state.get("files", {})
        if saved.keys() != self._samplers.keys():
            before = ", ".join(saved) or "a run without data.weights"
            raise ValueError(f"the saved position is in {before}, but the files are {', '.join(self._samplers)} now")
        for name, sampler in self._samplers.items():
            try:
                sampler.restore(saved[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            self._credits[name] = saved[name]["credit"]

    def _next_file(self) -> str:
        for name, share in self._shares.items():
            self._credits[name] += share
        # One whose weight became 0 keeps its credit.
        chosen = max((name for name, share in self._shares.items() if share), key=lambda name: self._credits[name])
        self._credits[chosen] -= 1
        return chosen


type DataOrder[T] = Sampler[T] | Mixture[T]
