"""Consoles for commands, which print text literally: square brackets are no markup, `:words:` no emoji."""

from rich.console import Console


def plain_console(*, stderr: bool = False, soft_wrap: bool = True, piped_columns: int | None = None) -> Console:
    """A console for standard output or standard error.

    Args:
        piped_columns: width of output to a file or a pipe.
    """
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)
    if piped_columns is not None and not console.is_terminal:
        console.width = piped_columns
    return console
