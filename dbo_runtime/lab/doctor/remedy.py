"""What a reason to decline means, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """What reasons of one kind mean, and what to do about them.

    Attributes:
        reasons: phrases of `Decline.reason`; `*` is what varies.
        meaning: the fact behind it.
        action: action to take; it says so where there is none.
    """

    reasons: tuple[str, ...]
    meaning: str
    action: str
