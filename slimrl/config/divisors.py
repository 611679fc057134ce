"""What to use instead of a size that does not fit, for the end of a message."""

from collections.abc import Callable


def fitting_text(wrong: int, fits: Callable[[int], bool], largest: int) -> str:
    """` Use A or B.`: the nearest sizes on either side of `wrong`, up to `largest`, that fit; empty if none does.

    Args:
        fits: whether the rules of this setting all hold for a size.
    """
    below = next((size for size in range(min(wrong - 1, largest), 0, -1) if fits(size)), None)
    above = next((size for size in range(wrong + 1, largest + 1) if fits(size)), None)
    sizes = [str(size) for size in (below, above) if size is not None]
    return f" Use {' or '.join(sizes)}." if sizes else ""


def multiples_text(size: int, wrong: int) -> str:
    """` Use A or B.`: the multiples of `size` on either side of `wrong`, from `size` on."""
    below = wrong // size * size
    return f" Use {' or '.join(str(number) for number in (below, below + size) if number)}."
