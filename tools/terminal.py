"""How commands print: tables whole into a pipe, sizes in the unit that fits, no chatter of libraries."""

from rich.console import Console

from slimrl.observability.terminal import plain_console

PIPED_COLUMNS = 240
"""Width of what goes into a file or a pipe, where nothing is cut to the terminal's width."""


def make_console() -> Console:
    """For standard output; square brackets are printed as they are."""
    return plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS)


def shorten(count: float, units: tuple[str, ...]) -> str:
    """A number with two decimals in the largest of the units, each a thousand times the one before, that it fills."""
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:,.2f} {unit}" if unit != units[0] else f"{count:,} {unit}".rstrip()
        count /= 1000
    return f"{count:,.2f} {units[-1]}"


def show_count(count: int) -> str:
    """Of parameters."""
    return shorten(count, ("", "K", "M", "B"))


def show_bytes(nbytes: int) -> str:
    """In decimal units, as disks are sold."""
    return shorten(nbytes, ("bytes", "kB", "MB", "GB"))


def counted(count: int, noun: str) -> str:
    """The number and the noun, in the plural unless it is 1. For nouns whose plural is regular."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
