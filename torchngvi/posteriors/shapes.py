"""Shapes of samples: a number of draws, or sizes."""

from collections.abc import Sequence

from torchngvi.errors import InputError

Shape = int | Sequence[int]  # of a sample: a number of draws, or their shape


def sizes(shape: Shape) -> tuple[int, ...]:
    """Read the shape of a sample, in which a number of draws n stands for (n,).

    Args:
        shape: a number or the sizes.

    Returns:
        The sizes.

    Raises:
        InputError: anything else, or a negative size.

    >>> sizes(3), sizes((2, 5)), sizes(())
    ((3,), (2, 5), ())
    """
    given = (shape,) if isinstance(shape, int) else shape
    if not (isinstance(given, Sequence) and all(isinstance(n, int) and n >= 0 for n in given)):
        raise InputError(f"a sample is of a number of draws or of a shape, such as 10 or (2, 5); got {shape!r}.")
    return tuple(given)


def number_of_draws(n: int) -> int:
    """A number of draws, after a check that it is one.

    Args:
        n: the number, at least one.

    Returns:
        It.

    Raises:
        InputError: anything else.

    >>> number_of_draws(3)
    3
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n is a number of draws, such as 1000; got {n!r}.")
    return n
