"""Fields of objects in files that others may have written. Each field is checked as it is read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from dbo_runtime.errors import ConfigError


class Fields:
    """An object in a file, with its location."""

    def __init__(self, content: Any, where: str) -> None:
        if type(content) is not dict:
            raise ConfigError(f"{where} is {reprlib.repr(content)}; it must be an object.")
        self.content: dict[str, Any] = content
        self._where = where

    def get(self, name: str, is_allowed: Callable[[Any], bool], allowed: str) -> Any:
        """Return a field. Raise ConfigError unless it is allowed."""
        value = self.content.get(name)
        if not is_allowed(value):
            raise ConfigError(f"{self._where}: {name} is {reprlib.repr(value)}; it must be {allowed}.")
        return value

    def open(self, name: str) -> Fields:
        """Return a field that is an object itself."""
        return Fields(self.content.get(name), f"{self._where}: {name}")


def is_list(value: Any) -> bool:
    """Return whether the value is a list."""
    return type(value) is list


def is_count(value: Any) -> bool:
    """Return whether the value is a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_name(value: Any) -> bool:
    """Return whether the value is text that cannot disturb a terminal or a table."""
    return type(value) is str and value.isprintable() and 0 < len(value) <= 1000
