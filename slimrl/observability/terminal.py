"""Consoles for commands, which print text literally: square brackets are no markup, `:words:` no emoji, and characters
that steer a terminal are shown as what they are."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from slimrl.base.visible import visible


class _LiteralConsole(Console):
    def render_str(self, text: str, **settings: Any) -> Text:
        # Before a table measures its cells
        return super().render_str(visible(text), **settings)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Its own movements of the cursor and colours are no text.
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def plain_console(*, stderr: bool = False, soft_wrap: bool = True, piped_columns: int | None = None) -> Console:
    """A console for standard output or standard error.

    Args:
        piped_columns: width of output to a file or a pipe.
    """
    console = _LiteralConsole(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)
    if piped_columns is not None and not console.is_terminal:
        console.width = piped_columns
    return console
