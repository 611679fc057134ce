"""Groups of bounded size: the tensors of a checkpoint's file, or those that the trainer gathers at once."""

from collections.abc import Callable, Iterable


def group_by_bytes[T](items: Iterable[T], nbytes: Callable[[T], int], max_bytes: int) -> list[list[T]]:
    """Consecutive items in groups of at most `max_bytes`; a larger item has a group of its own."""
    groups: list[list[T]] = []
    filled = 0
    for item in items:
        size = nbytes(item)
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups
