"""Mutants that no test can kill, because they do what the module does: `equivalents.json`, with the reason for each.

An entry says where the mutation is by function, text of the line and change, so it holds when lines are moved. An entry
that fits no mutation any more is stale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .mutations import Mutation

FILE = Path(__file__).with_name("equivalents.json")


class Equivalent(NamedTuple):
    """A mutation that changes nothing that matters, and why.

    Attributes:
        place, line, change: as in `Mutation`.
        reason: why no test can tell.
    """

    place: str
    line: str
    change: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its mutation."""
        return self.place, self.line, self.change


def read_equivalents(file: Path = FILE) -> dict[str, list[Equivalent]]:
    """Return what is listed, by module."""
    listed = json.loads(file.read_text(encoding="utf-8"))
    return {module: [Equivalent(**entry) for entry in entries] for module, entries in listed.items()}


def find_stale(equivalents: Sequence[Equivalent], mutations: Sequence[Mutation]) -> list[Equivalent]:
    """Return the entries of a module that fit none of its mutations."""
    keys = {mutation.key for mutation in mutations}
    return [entry for entry in equivalents if entry.key not in keys]


def describe_stale(listed: Mapping[str, Sequence[Equivalent]], modules: Mapping[str, Sequence[Mutation]]) -> list[str]:
    """Return a line for each entry that fits no mutation of *modules*, and for modules that are none of them."""
    unknown = [f"{module}: no such module is mutated" for module in listed if module not in modules]
    stale = [(module, entry) for module in modules for entry in find_stale(listed.get(module, ()), modules[module])]
    return unknown + [f"{module}: no mutation {' | '.join(entry.key)}" for module, entry in stale]
