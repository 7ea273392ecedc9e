"""Conversion of size options to the width, depth and heads of a model, or to the height and width of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Shape = tuple[int, int, int]
"""Width, depth and number of heads of a model."""


def model_shape(
    named: Mapping[str, Shape], size: str | None, dim: int | None, depth: int | None, heads: int | None
) -> Shape:
    """Return the width, depth and number of heads of a model, from the name of a published size or from three numbers.

    Args:
        named: published sizes by name.
        size: name of a published size; None if the three numbers are given.
        dim: width of the tokens; None with ``size``.
        depth: number of transformer blocks; None with ``size``.
        heads: number of attention heads; None with ``size``.

    Raises:
        ValueError: if the name is unknown, if a name and a number are given, or if there is no name and a number is missing.
    """
    if size is not None:
        if size not in named:
            raise ValueError(f"size={size!r} is not one of {list(named)}")
        if any(value is not None for value in (dim, depth, heads)):
            raise ValueError(f"size={size!r} sets dim, depth and heads; leave them out, or leave size out")
        return named[size]
    if dim is None or depth is None or heads is None:
        raise ValueError(f"give size ({', '.join(named)}), or all of dim, depth and heads")
    return dim, depth, heads


def both_sides(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width from an option whose value is one number for both, or a pair.

    Args:
        name: name of the option, for messages.
        size: side of a square, or height and width.

    Raises:
        ValueError: if a list does not have two values, or if a value is below 1.
    """
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"{name}={size} must be the side of a square, or height and width")
    return sides[0], sides[1]
