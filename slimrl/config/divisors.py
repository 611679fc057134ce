"""What to use instead of a size that does not divide, for the end of a message."""


def divisors_text(number: int, wrong: int) -> str:
    """` Use A or B.`: the divisors of `number` on either side of `wrong`."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    nearest = [max(size for size in divisors if size < wrong), *[size for size in divisors if size > wrong][:1]]
    return f" Use {' or '.join(map(str, nearest))}."


def multiples_text(size: int, wrong: int) -> str:
    """` Use A or B.`: the multiples of `size` on either side of `wrong`, from `size` on."""
    below = wrong // size * size
    return f" Use {' or '.join(str(number) for number in (below, below + size) if number)}."
