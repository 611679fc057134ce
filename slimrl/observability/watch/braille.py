"""Curves as text: a character of the braille block has two columns and four rows of dots."""

from collections.abc import Sequence

DOT_COLUMNS, DOT_ROWS = 2, 4
_FIRST = 0x2800
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of a dot by its column and row"""


def braille_rows(
    points: Sequence[tuple[float, float]],
    *,
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[str]:
    """A line through the points, by rising x, as `height` rows of `width` characters, the top one first.

    Args:
        x_range: x of the left and of the right end; all points are within, and the same for y. A range of one value is
            drawn in its middle.
    """
    columns, rows = width * DOT_COLUMNS, height * DOT_ROWS
    dots = [(_place(x, x_range, columns), rows - 1 - _place(y, y_range, rows)) for x, y in points]
    cells = [[0] * width for _ in range(height)]
    for (x, y), (next_x, next_y) in zip(dots, [*dots[1:], *dots[-1:]], strict=True):
        for step in range(steps := max(abs(next_x - x), abs(next_y - y), 1)):
            column, row = x + round((next_x - x) * step / steps), y + round((next_y - y) * step / steps)
            cells[row // DOT_ROWS][column // DOT_COLUMNS] |= _BITS[column % DOT_COLUMNS][row % DOT_ROWS]
    return ["".join(chr(_FIRST + bits) if bits else " " for bits in row) for row in cells]


def _place(value: float, bounds: tuple[float, float], count: int) -> int:
    low, high = bounds
    return count // 2 if high == low else round((value - low) / (high - low) * (count - 1))
