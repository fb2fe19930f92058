"""Split or not: the last word, with a memory so that it does not flicker."""

from __future__ import annotations

from collections.abc import Hashable

STAY = 0.5  # of the margin: what a split has to gain to stay where it is done already


class Gate:
    """Opens where the predicted gain exceeds a margin, and closes again where it falls below half of that.

    A pure function of the questions it was asked: ranks that ask the same get the same answers.
    """

    def __init__(self) -> None:
        self._open: set[Hashable] = set()

    def decide(self, key: Hashable, gain: float, margin: float) -> bool:
        """Return whether to split steps like *key*, of which *gain* (a share of the unsplit time) is predicted."""
        if gain > (margin * STAY if key in self._open else margin):
            self._open.add(key)
            return True
        self._open.discard(key)
        return False
