"""Width, depth and heads of a model: by a published name, or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Shape = tuple[int, int, int]
"""Width, depth and heads."""


def model_shape(
    named: Mapping[str, Shape], size: str | None, dim: int | None, depth: int | None, heads: int | None
) -> Shape:
    """Width, depth and heads of the size called ``size``, or those given.

    Raises:
        ValueError: for an unknown name, or when both or neither are given.
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
    """Height and width of a size that may be one number for both.

    Args:
        name: name of the option, for messages.
        size: side of a square, or height and width.

    Raises:
        ValueError: for anything else.
    """
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"{name}={size} must be the side of a square, or height and width")
    return sides[0], sides[1]
