"""A dictionary of limited size: caches must not grow over years of serving."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class BoundedDict(dict[Key, Entry]):
    """A dictionary of at most *max_size* entries that drops the oldest ones.

    Age counts from insertion, not from use, so that ranks with the same requests drop the same entries.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size

    def __setitem__(self, key: Key, entry: Entry) -> None:
        if len(self) >= self.max_size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, entry)
