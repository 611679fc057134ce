"""Numbers as commands print them: in a fitting unit, or with their noun."""


def shorten(count: float, units: tuple[str, ...]) -> str:
    """A number with two decimals in the largest unit that makes it at least 1; each unit is 1000 of the previous."""
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:,.2f} {unit}" if unit != units[0] else f"{count:,} {unit}".rstrip()
        count /= 1000
    return f"{count:,.2f} {units[-1]}"


def show_count(count: int) -> str:
    return shorten(count, ("", "K", "M", "B"))


def show_bytes(nbytes: int) -> str:
    """A number of bytes as text, in decimal units."""
    return shorten(nbytes, ("bytes", "kB", "MB", "GB"))


def counted(count: int, noun: str) -> str:
    """`1 engine`, `2 engines`; for nouns with a regular plural."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
