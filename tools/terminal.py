"""Consoles and tables of the commands."""

from collections.abc import Collection

from rich.console import Console
from rich.table import Table

from slimrl.observability.terminal import plain_console

PIPED_COLUMNS = 240
"""Width of output into a file or a pipe, so that nothing is cut to a terminal's width."""


def make_console() -> Console:
    """For standard output; prints square brackets as they are."""
    return plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS)


def make_table(*columns: str, right: Collection[str] = ()) -> Table:
    """A table without borders; `right`: columns that are aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
