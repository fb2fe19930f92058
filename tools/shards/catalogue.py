"""The list of shards, as `tests/shards.json` has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = "tests/shards.json"


class ShardsError(Exception):
    """Shards cannot be planned or run; the message is one line that says what to change."""


@dataclass(frozen=True)
class Word:
    """What `make` is called with to run tests: a word, and perhaps variables."""

    text: str
    variable: str = ""
    """The variable of the Makefile that takes the tests; empty where the word chooses them itself."""
    inputs: tuple[str, ...] = ()
    """Files and folders that its tests depend on without importing them."""


@dataclass(frozen=True)
class Shard:
    """Tests that CI runs together, or not at all."""

    name: str
    word: Word
    tests: tuple[str, ...]
    """Files, folders and single tests, relative to the root, as pytest takes them."""
    seconds: int
    """About how long the tests take on one core, until the ledger has measured it."""
    set_up: int = 0
    """Twice the seconds that its own environment takes, if it has one: both cores wait for it."""
    always: bool = False
    inputs: tuple[str, ...] = ()

    def covers(self, test: str) -> bool:
        """Return whether a test, without its parameters, is one of the shard's."""
        return any(is_within(test, entry) for entry in self.tests)


@dataclass(frozen=True)
class Catalogue:
    """All shards, and the limits that CI keeps."""

    shards: tuple[Shard, ...]
    budget: int
    """Seconds of one core for the shards that CI chooses."""
    oldest: int
    """Landings that a shard may go without passing."""
    inputs: tuple[str, ...] = ()
    """Files that every shard depends on."""

    def get(self, name: str) -> Shard:
        """Return the shard of that name."""
        for shard in self.shards:
            if shard.name == name:
                return shard
        raise ShardsError(f"no shard is called {name}: {FILE} has {', '.join(each.name for each in self.shards)}")


def is_within(test: str, entry: str) -> bool:
    """Return whether a test or a file is what an entry names, or in it."""
    return test == entry or test.startswith((f"{entry}::", f"{entry}/"))


def read_catalogue(root: Path) -> Catalogue:
    """Read the list of shards of a tree."""
    found = json.loads((root / FILE).read_text())
    words = {
        text: Word(text, each.get("variable", ""), tuple(each.get("inputs", ())))
        for text, each in found["words"].items()
    }
    shards = tuple(
        Shard(
            name=each["name"],
            word=words[each["word"]],
            tests=tuple(each["tests"]),
            seconds=each["seconds"],
            set_up=each.get("set_up", 0),
            always=each.get("always", False),
            inputs=tuple(each.get("inputs", ())),
        )
        for each in found["shards"]
    )
    check_names(shards)
    return Catalogue(shards, found["budget_seconds"], found["oldest_landings"], tuple(found["inputs"]))


def check_names(shards: Sequence[Shard]) -> None:
    """Refuse two shards of one name, and a shard without tests."""
    names = [shard.name for shard in shards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ShardsError(f"{FILE} names these twice: {', '.join(twice)}")
    empty = [shard.name for shard in shards if not shard.tests]
    if empty:
        raise ShardsError(f"{FILE} has shards without tests: {', '.join(empty)}")
