"""Find the word that was meant by a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like *word*; None if none is like it."""
    return next(iter(difflib.get_close_matches(word, [*known], n=1)), None)
