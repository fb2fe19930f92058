"""A figure with its range of possible values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """A figure by the published costs, with its least and greatest value over all corners.

    Attributes:
        low, point, high: the three values, in ascending order.
    """

    low: float
    point: float
    high: float

    def format(self, digits: int = 2, suffix: str = "") -> str:
        """Return text such as `1.29x (1.10 to 1.41)`; without the range where only one value was found."""
        if self.low == self.high:
            return f"{self.point:,.{digits}f}{suffix}"
        low, point, high = (f"{value:,.{digits}f}" for value in self)
        return f"{point}{suffix} ({low} to {high})"


def span(point: float, others: Iterable[float]) -> Range:
    """Return the range of a figure that is *point* by the published costs, and *others* in the corners."""
    every = [point, *others]
    return Range(min(every), point, max(every))
