"""A dictionary that forgets: what is cached for years of serving must not grow."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class BoundedDict(dict[Key, Entry]):
    """A dictionary of at most *max_size* entries, from which the oldest are dropped.

    It drops by age of insertion, not of use, so that ranks which are asked the same forget the same.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size

    def __setitem__(self, key: Key, entry: Entry) -> None:
        if len(self) >= self.max_size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, entry)
