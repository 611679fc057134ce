"""The consoles that commands print to: text goes out as it is, square brackets and words between colons included."""

from rich.console import Console


def plain_console(*, stderr: bool = False, soft_wrap: bool = True, piped_columns: int | None = None) -> Console:
    """A console for standard output or standard error.

    Args:
        soft_wrap: leave long lines to the terminal.
        piped_columns: width of what goes into a file or a pipe, where nothing is cut to the terminal's width.
    """

    def console(width: int | None) -> Console:
        return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, width=width)

    plain = console(None)
    return plain if plain.is_terminal or piped_columns is None else console(piped_columns)
