"""A file of counts whose space is taken before it is used.

prometheus_client maps its files into memory, with holes that a first write fills: on a full disk that write ends the
process (SIGBUS). So blocks are allocated first, and what finds no room is kept until there is some.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.mmap_dict import MmapedDict

INITIAL_BYTES = 1 << 16  # as prometheus_client's; both double it
HEAD_BYTES = 8  # of a file
ENTRY_BYTES = 28  # of a key's entry besides the key, at most
RETRY_SECONDS = 10.0


class CountFile:
    """Values by key, in a file that prometheus_client merges with others.

    Args:
        path: of the file, which is made as soon as there is room for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: MmapedDict | None = None
        self._values: dict[str, float] = {}  # in the file, which no other process writes
        self._kept: dict[str, float] = {}  # what has no room in the file
        self._size = 0
        self._used = HEAD_BYTES
        self._next_try = 0.0

    def add(self, key: str, amount: float) -> None:
        """Add *amount* to a value.

        Raises:
            OSError: if there is no room for its key, once in `RETRY_SECONDS`. The amount is kept and added later.
        """
        value = self._values.get(key)
        if value is not None:
            assert self._file is not None, "it has been opened for its first key"
            self._values[key] = value = value + amount
            self._file.write_value(key, value, 0.0)
            return
        self._kept[key] = self._kept.get(key, 0.0) + amount
        now = time.monotonic()
        if now >= self._next_try:
            self._next_try = now + RETRY_SECONDS
            self._write_kept()
            self._next_try = 0.0

    def put(self, key: str, value: float) -> None:
        """Replace a value. Of several files with the same key, readers take what was put last.

        Raises:
            OSError: if there is no room for its key. Nothing is kept.
        """
        if key not in self._values:
            self._make_room(key)
        self._values[key] = value
        assert self._file is not None, "it has been opened for its first key"
        self._file.write_value(key, value, time.time())

    def exists(self) -> bool:
        """Return whether the file is where others look for it."""
        return self._path.exists()

    def _write_kept(self) -> None:
        for key in list(self._kept):
            self._make_room(key)
            self._values[key] = 0.0
            self.add(key, self._kept.pop(key))

    def _make_room(self, key: str) -> None:
        used = self._used + ENTRY_BYTES + len(key.encode())
        size = self._size or INITIAL_BYTES
        while used > size:
            size *= 2
        if self._file is None:
            self._open(size)
        elif size > self._size:
            _allocate(self._path, size)
        self._size, self._used = size, used

    def _open(self, size: int) -> None:
        """Make the file under another name: prometheus_client fails at files that are empty yet."""
        from prometheus_client.mmap_dict import MmapedDict

        draft = self._path.with_suffix(".new")
        try:
            _allocate(draft, size)
            draft.rename(self._path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self._file = MmapedDict(str(self._path))
        weakref.finalize(self, self._file.close)


def _allocate(path: Path, size: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    finally:
        os.close(file)
