"""Progress bars on standard error, if it is a terminal and tqdm is installed, as it is wherever vLLM is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def show_progress(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """Yield *items*, with a bar that says *what* is done to them and counts them in *unit*; it goes away at the end."""
    if find_spec("tqdm") is None:
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, desc=what, unit=unit, leave=False, disable=None)
    return bar


def find_terminal() -> str:
    """Return the path of the terminal that standard error is, for bars of other processes; empty if it is none."""
    try:
        return os.ttyname(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal, or no descriptor at all
        return ""
