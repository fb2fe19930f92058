"""A file of counts whose disk space is allocated before use.

prometheus_client maps its files into memory. They have holes that a first write fills, and on a full disk this write
ends the process (SIGBUS). So blocks are allocated first. Counts without room are kept in memory until there is some.
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

INITIAL_BYTES = 1 << 16  # same as prometheus_client's; both double it
HEAD_BYTES = 8  # bytes of a file's header
ENTRY_BYTES = 28  # largest size of an entry, besides its key
RETRY_SECONDS = 10.0


class CountFile:
    """Values by key, in a file that prometheus_client merges with others.

    Args:
        path: path of the file, which is made as soon as there is room for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: MmapedDict | None = None
        self._values: dict[str, float] = {}  # values in the file, which no other process writes
        self._kept: dict[str, float] = {}  # values without room in the file
        self._size = 0
        self._used = HEAD_BYTES
        self._next_try = 0.0

    def add(self, key: str, amount: float) -> None:
        """Add *amount* to a value.

        Raises:
            OSError: there is no room for the key; raised at most once in `RETRY_SECONDS`. The amount is kept and added
                later.
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
        """Replace a value. If several files have the same key, readers take the latest value.

        Raises:
            OSError: there is no room for the key. Nothing is kept.
        """
        if key not in self._values:
            self._make_room(key)
        self._values[key] = value
        assert self._file is not None, "it has been opened for its first key"
        self._file.write_value(key, value, time.time())

    def exists(self) -> bool:
        """Return whether the file still exists where readers look for it."""
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
        """Make the file under another name first, because prometheus_client fails at empty files."""
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
