"""Fields of objects in files that others may have written: each is checked where it is read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from dbo_runtime.errors import ConfigError


class Fields:
    """An object of a file, and where it is."""

    def __init__(self, content: Any, where: str) -> None:
        if type(content) is not dict:
            raise ConfigError(f"{where} is {reprlib.repr(content)}; it must be an object.")
        self.content: dict[str, Any] = content
        self._where = where

    def get(self, name: str, is_allowed: Callable[[Any], bool], allowed: str) -> Any:
        """Return a field; ConfigError unless it is as it must be."""
        value = self.content.get(name)
        if not is_allowed(value):
            raise ConfigError(f"{self._where}: {name} is {reprlib.repr(value)}; it must be {allowed}.")
        return value

    def open(self, name: str) -> Fields:
        """Return a field that is an object itself."""
        return Fields(self.content.get(name), f"{self._where}: {name}")


def is_list(value: Any) -> bool:
    """Whether it is a list."""
    return type(value) is list


def is_count(value: Any) -> bool:
    """Whether it is a whole number, at least 0."""
    return type(value) is int and value >= 0


def is_name(value: Any) -> bool:
    """Whether it is text that leaves a terminal and a table as they are."""
    return type(value) is str and value.isprintable() and 0 < len(value) <= 1000
